"""Prints what differs between torchrl's released engine and balancer and ours, a line each; run in the environment with
torchrl."""

import inspect
from collections.abc import Iterator

import torchrl
from torchrl.modules.llm.backends.vllm import vllm_async

from genserve.integrations import torchrl as ours

# They start or address Ray's actors.
OF_RAY = {"__init__", "collective_rpc", "from_pretrained", "launch"}


def differences(released: type, mine: type, left_out: set[str]) -> Iterator[str]:
    """Public methods and parameters that ours lacks, or has at another place, of another kind or default."""
    for name, method in inspect.getmembers(released, callable):
        if name in left_out or (name.startswith("_") and name != "__init__"):
            continue
        if not hasattr(mine, name):
            yield f"{released.__name__}.{name} is missing"
            continue
        wanted = [(each.name, each.kind, each.default) for each in inspect.signature(method).parameters.values()]
        found = [
            (each.name, each.kind, each.default) for each in inspect.signature(getattr(mine, name)).parameters.values()
        ]
        if found != wanted:
            yield f"{released.__name__}.{name} takes {found}, torchrl's {wanted}"


if __name__ == "__main__":
    print(f"compared with torchrl {torchrl.__version__}")
    for line in differences(vllm_async.AsyncVLLM, ours.AsyncVLLM, OF_RAY):
        print(line)
    for line in differences(vllm_async.LoadBalancer, ours.LoadBalancer, set()):
        print(line)
