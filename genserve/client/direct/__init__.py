"""Tokens straight from the replicas of a fleet: the router names them, and the client chooses among them itself."""
