"""The model that a worker has loaded: its tensors, the references to them, and values computed from them."""
