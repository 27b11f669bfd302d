"""vLLM's OpenAI server on a client of the daemon's engine: its flags, its application, and the door of its requests."""
