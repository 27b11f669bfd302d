"""Memory that processes share, which processes can share it, and how much of it there is."""
