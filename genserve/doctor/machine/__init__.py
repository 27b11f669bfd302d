"""The machine: its memory, its devices, what they can do, and verdicts on this."""
