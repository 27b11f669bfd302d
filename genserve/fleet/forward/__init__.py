"""Tokens through a router: requests go to the replica that is chosen, and answers come back as bytes."""
