"""How vLLM is started: its configuration, what is refused before it loads a model, and other hosts."""
