"""Versions that the daemon fetches itself, from a checkpoint on its host or from its peers."""
