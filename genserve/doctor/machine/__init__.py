"""The machine: its memory, its devices, what they can do, and what that means."""
