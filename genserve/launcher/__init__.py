"""Processes that a program starts, and how they end: in order, or with the program."""
