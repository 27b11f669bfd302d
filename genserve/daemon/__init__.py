"""The composition roots: the daemon, its front ends, and the process of its OpenAI server."""
