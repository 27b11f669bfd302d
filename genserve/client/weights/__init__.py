"""WeightService for a client: tensors to bytes, pushes, pulls."""
