"""What the daemon needs of an engine (`protocol`), in domain types (`generation`). `vllm` is the only
implementation."""
