"""Frames of weights as they cross the wire: those of a push, and those of a pull."""
