"""The checkpoint that the engine has loaded: its index, its files, its bytes, and whether they are resident."""
