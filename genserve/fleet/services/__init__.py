"""The services of a router."""
