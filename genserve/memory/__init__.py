"""Memory that processes share, and who can share it. Imports the standard library alone."""
