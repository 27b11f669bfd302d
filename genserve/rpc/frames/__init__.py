"""Frames of weights on the wire: those of a push, and those of a pull."""
