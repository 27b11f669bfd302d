"""The engine that is vLLM: the only place that talks to `AsyncLLM`, and to vLLM's workers through `collective_rpc`."""
