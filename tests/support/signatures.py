"""What tests of vLLM's internals ask of its functions."""

import inspect


def parameters(function: object) -> set[str]:
    """Names of a function's parameters."""
    return set(inspect.signature(function).parameters)  # type: ignore[arg-type]
