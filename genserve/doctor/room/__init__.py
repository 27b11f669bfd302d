"""What versions of the weights take of memory, and whether that fits a machine."""
