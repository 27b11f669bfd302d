"""Tensors as named bytes: what the daemon, its workers and the client agree on. Standard library only at import."""
