"""The clients of genserve in their languages, on the same load."""
