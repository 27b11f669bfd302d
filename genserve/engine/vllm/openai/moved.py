"""Names of vLLM's server whose modules differ between the supported versions.

They are imported when they are used: a name that has moved again must stop the OpenAI port, not the daemon. Remove the
modules of a version when it leaves the range of `genserve.installed_engine`. tests/engine/test_openai_internals.py
imports all names.
"""

import importlib.util
from typing import Any, Final

_MODULES: Final = {
    # name: its module in vLLM 0.33, its module in vLLM 0.32
    "FrontendArgs": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "make_arg_parser": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "validate_parsed_serve_args": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
}
NAMES: Final = tuple(_MODULES)


def moved(name: str) -> Any:
    """The object that vLLM calls `name`. Raises ImportError if none of its modules has it, and the errors of importing
    them."""
    for module in _MODULES[name]:
        if _exists(module) and hasattr(found := importlib.import_module(module), name):
            return getattr(found, name)
    raise ImportError(f"vLLM has no {name} in {' or '.join(_MODULES[name])}")


def _exists(module: str) -> bool:
    # find_spec imports the package above, which an older version may lack.
    above, _, _ = module.rpartition(".")
    return above == "" or (_exists(above) and importlib.util.find_spec(module) is not None)
