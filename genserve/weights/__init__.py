"""New weights: receive, check and apply them on every rank, and keep them for pulls."""
