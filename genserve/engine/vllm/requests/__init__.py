"""One request: into vLLM's prompt and sampling parameters, and out of its outputs."""
