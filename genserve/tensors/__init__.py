"""Tensors as named bytes: the format that the daemon, its workers and the client share. Imports only the standard
library."""
