"""Runs the drivers of clients over the scenarios, against real daemons, and compares what comes out."""
