"""What a loader does with the tensors of a checkpoint: recorded at one push, done again without it at the next."""
