"""What a fleet costs and gains: pushes between hosts, and tokens through a router."""
