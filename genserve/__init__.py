"""genserve: a gRPC streaming generation daemon around vLLM's AsyncLLM.

This module owns the version, and the name `launch`, which is loaded when it is used: importing this costs nothing.
Start at `genserve.client` to call a daemon, at `genserve.daemon.serve` to read how one is put together.
"""

from importlib import import_module

TYPE_CHECKING = False  # as typing's, which type checkers know by its name
if TYPE_CHECKING:
    from genserve.launcher import launch as launch

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "launch":
        return import_module("genserve.launcher").launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
