"""The trial of a daemon: start it, push to it, and compare it with a cold start."""
