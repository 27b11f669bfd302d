"""vLLM's OpenAI server in front of the daemon's engine: which one it is, its process, and what goes between the two."""
