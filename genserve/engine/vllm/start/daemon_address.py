"""The address at which workers on other hosts reach the daemon, as vLLM's flags spread an engine. Pure."""

from collections.abc import Callable
from typing import Any

from genserve.engine.vllm.start.failure import EngineStartError
from genserve.net.addresses import is_loopback, joined

ParallelConfig = Any
"""vLLM's ParallelConfig, or what has its fields."""

_WILDCARDS = frozenset({"0.0.0.0", "::", "[::]"})


def daemon_address(parallel: ParallelConfig, host: str, port: int, own_ip: Callable[[], str]) -> str:
    """The "HOST:PORT" at which other hosts reach the daemon that listens on `host` and `port`; "" if there are none,
    or none that is known. `own_ip` returns this host's address, for Ray, which alone knows where workers will be.
    Raises EngineStartError naming the flag that keeps other hosts from reaching it."""
    if parallel.use_ray:
        return "" if port <= 0 or is_loopback(host) else joined(own_ip() if host in _WILDCARDS else host, port)
    first = _first_host(parallel)
    if first == "" or is_loopback(first):
        return ""
    if port <= 0:
        raise EngineStartError(
            f"--port {port}: workers on other hosts fetch pushed weights from the daemon, and end when it ends: pass "
            "a port, the same on every host"
        )
    if is_loopback(host):
        raise EngineStartError(
            f"--host {host}: workers on other hosts fetch pushed weights from the daemon, and cannot reach this "
            f"address: listen on {first} or 0.0.0.0"
        )
    return joined(first if host in _WILDCARDS else host, port)


def _first_host(parallel: ParallelConfig) -> str:
    """The daemon's host, as the others address it; "" if there are none."""
    if parallel.nnodes > 1:
        return str(parallel.master_addr)
    if parallel.data_parallel_size_local < parallel.data_parallel_size:
        return str(parallel.data_parallel_master_ip)
    return ""
