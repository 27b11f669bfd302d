"""The workers of another host: `genserve serve --headless` runs them for the daemon on the first host.

The daemon uses them through vLLM like its own. They end with the daemon and with this process, and this process ends
with them.
"""

import argparse
import copy
import sys
from contextlib import closing
from dataclasses import fields

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import get_ip

from genserve.engine.vllm.start import config as vllm_config
from genserve.engine.vllm.start import refusals, stale_shm
from genserve.engine.vllm.start.daemon_address import daemon_address
from genserve.engine.vllm.start.failure import EngineStartError, Report
from genserve.process import leftovers
from genserve.settings.config import ServeConfig
from genserve.worker.contract.lifetime import end_with_address

EXIT_FAILED = 1
_START_TIMEOUT_S = 3600.0  # of the daemon, which waits for these workers and loads the model like them


def run(args: AsyncEngineArgs, config: ServeConfig) -> int:
    """Runs the workers until the daemon or one of them has ended, or a signal; the exit status. Raises
    EngineStartError."""
    args = vllm_config.adapted(args, config.weight_update)
    leftovers.sweep()
    stale_shm.sweep()
    with closing(Report()) as report, vllm_config.start_explained(args, report):
        # A copy: the values that it fills in would count as flags the next time.
        checked = vllm_config.with_ranks_here(
            args, copy.copy(args).create_engine_config(UsageContext.ENGINE_CONTEXT, headless=True)
        )
        refusals.check(checked, with_openai=True)  # whether there is HTTP is said on the daemon's host
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
    return EXIT_FAILED  # a worker has died: nothing else ends it
