"""From flags to an engine whose processes run."""

import copy
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from vllm.config import VllmConfig
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import get_ip

from genserve.engine.vllm.clients.rows import ClientRows
from genserve.engine.vllm.requests.intake import IntakeLimits
from genserve.engine.vllm.start import clients, refusals
from genserve.engine.vllm.start import config as vllm_config
from genserve.engine.vllm.start import progress as steps
from genserve.engine.vllm.start.clients import ALONE, Clients, StartedEngine
from genserve.engine.vllm.start.config import AsyncEngineArgs
from genserve.engine.vllm.start.daemon_address import daemon_address
from genserve.engine.vllm.start.failure import Report, configuring
from genserve.engine.vllm.start.progress import Progress
from genserve.engine.vllm.start.series import stat_loggers
from genserve.process.signals import children_ignore_interrupts
from genserve.security.files import PLAINTEXT, CallerFiles


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`limits`: of requests; `weight_update`: auto or a way of genserve.worker.contract.placement; `host` and `port`:
    where the daemon listens; `clients`: the processes that send requests; `peers`: how workers on other hosts call the
    daemon; `with_series`: they count vLLM's series, but not with --disable-log-stats."""

    limits: IntakeLimits
    weight_update: str = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    clients: Clients = ALONE
    peers: CallerFiles = PLAINTEXT
    with_series: bool = False


@dataclass(frozen=True, slots=True)
class Launched:
    """vLLM's engine, whose processes run. `args`: as it got them; `rows`: of all clients; `report`: what the processes
    say of their ends; `address`: at which other hosts reach the daemon, if there are any; `warnings`: of settings that
    have a cost when weights are pushed; `logs_stats`: without --disable-log-stats."""

    started: StartedEngine
    args: AsyncEngineArgs
    rows: ClientRows
    options: EngineOptions
    report: Report
    address: str
    warnings: tuple[str, ...]
    logs_stats: bool


@dataclass(frozen=True, slots=True)
class Configured:
    """What vLLM makes of the flags. `address` and `warnings` as in Launched."""

    config: VllmConfig
    address: str
    warnings: tuple[str, ...]


def configured(args: AsyncEngineArgs, options: EngineOptions) -> Configured:
    """As AsyncLLM.from_engine_args begins, with a look at the configuration before any process starts. Raises
    EngineConfigError, or what vLLM raises."""
    with configuring(args.model):
        config = vllm_config.with_ranks_here(args, args.create_engine_config(UsageContext.ENGINE_CONTEXT))
        warnings = refusals.check(config, with_openai=options.clients.with_openai)
        address = daemon_address(config.parallel_config, options.host, options.port, get_ip)
    return Configured(config, address, warnings)


def launch(args: AsyncEngineArgs, options: EngineOptions, progress: Progress) -> Launched:
    """Starts the processes, and returns when they are ready. It blocks, so it runs in a thread: vLLM's client is made
    to be used on an event loop that it first sees later."""
    logs_stats = not args.disable_log_stats
    options = replace(options, with_series=options.with_series and logs_stats)
    args = vllm_config.adapted(args, options.weight_update)
    logging_config = args.create_logging_config()
    given = copy.copy(args)  # the values that vLLM fills in would count as flags the next time
    with ExitStack() as stack:
        report = stack.enter_context(closing(Report()))
        with vllm_config.start_explained(args, report, progress.path), children_ignore_interrupts():
            found = configured(args, options)
            config = found.config
            options = replace(options, clients=clients.possible(config, options.clients))
            rows = ClientRows.create(options.clients.count, config.parallel_config.data_parallel_size)
            row = rows.row(clients.DAEMON)
            progress.reach_soon(steps.PROCESSES)
            loggers = stat_loggers(row, with_series=options.with_series)
            started = clients.start(config, args, loggers, options.clients, rows.counters)
        stack.pop_all()  # the report is the engine's
    started.llm.vllm_config.logging_config = logging_config  # without the files of the start, for front ends
    return Launched(started, given, rows, options, report, found.address, found.warnings, logs_stats)
