"""vLLM's OpenAI server in front of the daemon's engine: its process, and what goes between the two."""
