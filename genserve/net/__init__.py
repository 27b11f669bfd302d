"""Addresses, and listening on them."""
