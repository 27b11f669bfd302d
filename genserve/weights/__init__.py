"""New weights: received, checked, applied on every rank, and kept to be pulled."""
