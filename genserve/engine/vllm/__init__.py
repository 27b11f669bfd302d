"""The vLLM engine: the only code that calls `AsyncLLM`, and vLLM's workers through `collective_rpc`."""
