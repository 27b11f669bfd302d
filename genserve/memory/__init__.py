"""Memory that processes share, who can share it, and checksums of what lies there."""
