"""The start of vLLM: its configuration, flags that are refused before a model is loaded, and other hosts."""
