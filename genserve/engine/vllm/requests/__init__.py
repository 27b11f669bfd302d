"""Converts a request to vLLM's prompt and sampling parameters, and vLLM's outputs to results."""
