"""What the process of an OpenAI server has of its own: an environment in which it does not control the engine, and a
limit of open files."""

import resource
from collections.abc import Mapping
from typing import Final

_DROPPED: Final = frozenset(
    {
        "VLLM_SERVER_DEV_MODE",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_ENABLE_SCALE_OUT_ENDPOINTS",
        "PROMETHEUS_MULTIPROC_DIR",
    }
)
"""They would open routes that pause the engine, update its weights, load adapters or abort requests; and show at
/metrics, which needs no key there, what the daemon counts."""


def of_server(environment: Mapping[str, str]) -> dict[str, str]:
    """The daemon's, without what would open such routes."""
    return {name: value for name, value in environment.items() if name not in _DROPPED}


_MAX_FILES: Final = 65_535
"""What `vllm serve` allows itself."""


def allow_connections() -> None:
    """Raises this process's limit of open files, of which each connection is one: it is often 1024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
