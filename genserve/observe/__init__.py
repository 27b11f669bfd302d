"""Logs, traces and histograms: what a process says of itself. It knows no service."""
