"""The model that a worker has loaded: its tensors, what can reach them, and what else was computed from them."""
