"""What the daemon needs of an engine (`protocol`), in domain types (`generation` and `types`). `vllm` is the only
implementation."""
