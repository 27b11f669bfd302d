"""From the command line of `genserve serve` to an engine whose processes run.

Its flags are the daemon's, vLLM's engine flags, and those of vLLM's OpenAI server.
"""

import argparse
import copy
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

from vllm.config import VllmConfig
from vllm.usage.usage_lib import UsageContext
from vllm.utils.network_utils import get_ip

from genserve.demo_model import built_demo_model
from genserve.engine.vllm.clients.rows import ClientRows
from genserve.engine.vllm.openai import flags as openai_flags
from genserve.engine.vllm.requests.intake import IntakeLimits
from genserve.engine.vllm.start import clients, refusals
from genserve.engine.vllm.start import config as vllm_config
from genserve.engine.vllm.start import progress as steps
from genserve.engine.vllm.start.clients import ALONE, Clients, StartedEngine, stat_loggers
from genserve.engine.vllm.start.config import AsyncEngineArgs
from genserve.engine.vllm.start.failure import EngineConfigError, EngineStartError, Report, configuring
from genserve.engine.vllm.start.other_hosts import daemon_address
from genserve.engine.vllm.start.progress import Progress
from genserve.process.signals import children_ignore_interrupts
from genserve.security.files import PLAINTEXT, CallerFiles
from genserve.settings.config import ServeConfig, check_model

_DESCRIPTION = (
    "Serve a model over gRPC: stream tokens, receive weights, pause and resume. MODEL, or --model, is a checkpoint's "
    "directory or its name on the hub; without it the demo model is served. "
    "--help=genserve shows the daemon's own flags, --help=all every flag, --help=max-model-len those of a name."
)


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
    """The configuration that vLLM makes of the flags. `address` and `warnings` as in Launched."""

    config: VllmConfig
    address: str
    warnings: tuple[str, ...]


def parse(argv: Sequence[str]) -> tuple[ServeConfig, argparse.Namespace]:
    """The daemon's settings, and all flags. Wrong flags raise SystemExit, as argparse does."""
    parser = vllm_config.parser("genserve serve", _DESCRIPTION)
    ServeConfig.add_flags(parser)
    openai_flags.add_flags(parser)
    flags = parser.parse_args(argv)
    try:
        config = ServeConfig.from_flags(vars(flags))
        if flags.model is not None:
            elsewhere = flags.hf_config_path is not None or flags.config_format != "auto" or bool(flags.hf_overrides)
            check_model(flags.model, has_config_elsewhere=elsewhere)
    except ValueError as error:
        parser.error(str(error))
    return config, flags


def check_refused(config: ServeConfig, flags: argparse.Namespace) -> None:
    """Raises EngineConfigError for flags that are refused whatever the model is."""
    try:
        # The daemon on the first host decides whether there is HTTP, and not the workers of another one.
        vllm_config.check_flags(flags, config.weight_update, with_openai=config.with_openai or config.headless)
        openai_flags.check_flags(flags, config)
    except (ValueError, EngineStartError) as error:
        raise EngineConfigError(str(error)) from error


def check(argv: Sequence[str]) -> tuple[str, ...]:
    """All that can be checked without a process of the engine, as a start checks it. Returns warnings. Raises
    SystemExit, ValueError and EngineStartError."""
    config, flags = parse(argv)
    check_refused(config, flags)
    if flags.model is None:
        if (model := built_demo_model()) is None:
            return ("the built-in model is built at the first start, and its flags are checked then",)
        flags.model = str(model)
    args = vllm_config.engine_args(flags)
    if config.headless:
        return ()
    args = vllm_config.adapted(args, config.weight_update)
    with closing(Report()) as report, vllm_config.start_explained(args, report):
        return configured(args, engine_options(config)).warnings


def engine_options(config: ServeConfig, num_frontends: int = 0, *, with_series: bool = False) -> EngineOptions:
    """How the daemon starts its engine."""
    max_n = min(config.max_n, config.max_active_requests)  # more would always be refused
    limits = IntakeLimits(config.max_active_requests, max_n, config.trust_request_chat_template)
    clients = Clients(num_frontends, config.with_openai, if_possible=config.frontends == -1)
    return EngineOptions(limits, config.weight_update, config.host, config.port, clients, config.peers, with_series)


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
