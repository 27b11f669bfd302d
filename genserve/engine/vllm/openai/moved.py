"""Names of vLLM's server that lie in other modules from one supported version to the next. The only place that knows.

Imported when they are used: a name that has moved again must stop the OpenAI port, not the daemon. When the older
version leaves the range (`genserve.installed_engine`), its branch goes. tests/engine/test_openai_internals.py imports
all of them.
"""

import importlib.util
from typing import Any, Final

_MODULES: Final = {
    # name: where 0.33 has it, where 0.32 has it
    "FrontendArgs": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "make_arg_parser": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "validate_parsed_serve_args": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "jsonify_non_default_args": ("vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils"),
}
NAMES: Final = tuple(_MODULES)


def moved(name: str) -> Any:
    """What vLLM calls `name`. Raises ImportError if it is in no module that a supported version has it in, and what the
    import of a module that is there raises."""
    for module in _MODULES[name]:
        if _exists(module) and hasattr(found := importlib.import_module(module), name):
            return getattr(found, name)
    raise ImportError(f"vLLM has no {name} in {' or '.join(_MODULES[name])}")


def _exists(module: str) -> bool:
    # find_spec imports the package above, which an older version may lack.
    above, _, _ = module.rpartition(".")
    return above == "" or (_exists(above) and importlib.util.find_spec(module) is not None)
