"""Requests: into vLLM's prompts and sampling parameters, running, and out of its outputs."""
