"""The workers of another host: `genserve serve --headless` runs them for the daemon of the first host.

The daemon sees them through vLLM as it sees its own. They end with this process, and this process ends with the daemon:
vLLM's own would wait for a daemon that was killed for ever, with all their memory.
"""

import argparse
import os
import socket
import sys
import threading
import time
from dataclasses import fields

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from genserve.config import ServeConfig
from genserve.engine import other_hosts, refusals, vllm_config
from genserve.engine.start_failure import EngineStartError

EXIT_FAILED = 1
_LOOKS_S = 2.0
_LOOK_TIMEOUT_S = 5.0
_MAX_MISSED = 3
_START_TIMEOUT_S = 3600.0


def run(args: AsyncEngineArgs, config: ServeConfig) -> int:
    """Runs the workers until the daemon or one of them has ended, or a signal; the exit status. Raises
    EngineStartError."""
    args = vllm_config.adapted(args, config.weight_update)
    with vllm_config.start_explained(args):
        checked = args.create_engine_config(UsageContext.ENGINE_CONTEXT, headless=True)
        refusals.check(checked)
        address = other_hosts.daemon_address(checked.parallel_config, config.host, config.port)
        if not address:
            raise EngineStartError(
                "--headless runs the workers of another host: say how many there are (--nnodes or "
                "--data-parallel-size-local), and where the first one is (--master-addr or --data-parallel-address)"
            )
    host, _, port = address.rpartition(":")
    threading.Thread(target=_end_with, args=(host.strip("[]"), int(port)), name="genserve-watch", daemon=True).start()
    print(f"genserve: running workers for the daemon on {address}", file=sys.stderr, flush=True)
    # internal: what `vllm serve --headless` calls. It takes parsed flags, some of which are not an engine's; and it is
    # imported here because vLLM's HTTP server comes with it.
    from vllm.entrypoints.cli.serve import run_headless

    flags = {field.name: getattr(args, field.name) for field in fields(args)}
    run_headless(argparse.Namespace(**flags, api_server_count=0))
    return EXIT_FAILED  # a worker has died: nothing else ends it


def _end_with(host: str, port: int) -> None:
    """Ends this process when nobody listens there any more, once somebody has; nothing of HTTP/2 or gRPC is spoken, so
    that processes may be started meanwhile."""
    missed, was_there, began_s = 0, False, time.monotonic()
    while missed < _MAX_MISSED:
        time.sleep(_LOOKS_S)
        if _listens(host, port):
            missed, was_there = 0, True
        elif was_there or time.monotonic() - began_s > _START_TIMEOUT_S:
            missed += 1
    print(f"genserve: the daemon on {host}:{port} has ended", file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _LOOK_TIMEOUT_S).close()
    except OSError:
        return False
    return True
