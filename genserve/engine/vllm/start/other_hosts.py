"""An engine on several hosts: how workers on other hosts reach the daemon, and what runs them there.

`genserve serve --headless` runs the workers of another host for the daemon on the first host, which uses them through
vLLM like its own. The workers end with the daemon and with the headless process, which ends with its workers.
"""

import argparse
import copy
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import get_ip

from genserve.engine.vllm.start import config as vllm_config
from genserve.engine.vllm.start import refusals
from genserve.engine.vllm.start.failure import EngineStartError, Report
from genserve.net import is_loopback, joined
from genserve.process import leftovers
from genserve.settings.config import ServeConfig
from genserve.worker.contract.lifetime import end_with_address

EXIT_FAILED = 1
_START_TIMEOUT_S = 3600.0  # of the daemon, which waits for these workers and loads the model like them
ParallelConfig = Any
"""vLLM's ParallelConfig, or an object with its fields."""

_WILDCARDS = frozenset({"0.0.0.0", "::", "[::]"})


def daemon_address(parallel: ParallelConfig, host: str, port: int, own_ip: Callable[[], str]) -> str:
    """The "HOST:PORT" at which workers on other hosts reach the daemon that listens on `host` and `port`; "" if vLLM's
    flags put no workers there, or with Ray if workers there could not reach it. `own_ip` returns this host's address;
    it is used with Ray, which alone knows where workers will run. Raises EngineStartError, naming the flag to change.
    """
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


def run_workers(args: AsyncEngineArgs, config: ServeConfig) -> int:
    """Runs the workers until the daemon or a worker ends, or a signal comes. Returns the exit status. Raises
    EngineStartError."""
    args = vllm_config.adapted(args, config.weight_update)
    leftovers.sweep()
    leftovers.sweep_shared_memory()
    with closing(Report()) as report, vllm_config.start_explained(args, report):
        # A copy: the values that it fills in would count as flags the next time.
        checked = vllm_config.with_ranks_here(
            args, copy.copy(args).create_engine_config(UsageContext.ENGINE_CONTEXT, headless=True)
        )
        refusals.check(checked, with_openai=True)  # the daemon's host decides whether there is HTTP
        address = daemon_address(checked.parallel_config, config.host, config.port, get_ip)
        if not address:
            raise EngineStartError(
                "--headless runs the workers of another host: pass the number of hosts (--nnodes or "
                "--data-parallel-size-local), and where the first one is (--master-addr or --data-parallel-address)"
            )
        end_with_address(address, _START_TIMEOUT_S)
        print(f"genserve: running workers for the daemon on {address}", file=sys.stderr, flush=True)
        # internal: what `vllm serve --headless` calls. It takes parsed flags, some of which are not an engine's; and it
        # is imported here because vLLM's HTTP server comes with it.
        from vllm.entrypoints.cli.serve import run_headless

        flags = {field.name: getattr(args, field.name) for field in fields(args)}
        run_headless(argparse.Namespace(**flags, api_server_count=0))
    return EXIT_FAILED  # run_headless returns only when a worker has died
