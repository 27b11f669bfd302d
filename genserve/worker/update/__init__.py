"""The ways to replace the live version by a new one: beside, on the host, in place."""
