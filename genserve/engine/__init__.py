"""What the daemon asks of an engine (`protocol`), in its own types (`generation`). `vllm` is the one that there is."""
