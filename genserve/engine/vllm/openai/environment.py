"""Sets up the process of an OpenAI server: its name, an environment in which it cannot control the engine, and its
limit of open files."""

import os
import resource
from collections.abc import Mapping
from typing import Final

from genserve.worker.contract.lifetime import end_with_process

_MAX_N_VARIABLE: Final = "VLLM_MAX_N_SEQUENCES"
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


def begin(daemon_pid: int, max_n: int) -> None:
    """Call first. Ends this process with the daemon, however the daemon ends, and sets all of this up. `max_n`: the
    largest n of a request, and the most beams of one."""
    end_with_process(daemon_pid)
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the daemon, which ends this process
    allow_connections()
    environment = of_server(os.environ) | {_MAX_N_VARIABLE: str(max_n)}
    os.environ.clear()
    os.environ.update(environment)
    from vllm.utils.system_utils import set_process_title

    set_process_title("APIServer")


def of_server(environment: Mapping[str, str]) -> dict[str, str]:
    """The daemon's environment, without the variables that would open such routes."""
    return {name: value for name, value in environment.items() if name not in _DROPPED}


_MAX_FILES: Final = 65_535
"""The limit that `vllm serve` sets itself."""


def allow_connections() -> None:
    """Raises this process's limit of open files, of which each connection is one: it is often 1024 at first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
