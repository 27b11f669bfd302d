"""Tokens of a fleet: each request goes to the replica that is chosen, and elsewhere if that is lost. For a router, and
for a client that calls replicas itself. Answers are bytes here."""
