"""The command line of `genserve serve`: the daemon's flags, vLLM's engine flags, and those of its OpenAI server."""

import argparse
from collections.abc import Sequence
from contextlib import closing

from genserve.demo_model import built_demo_model
from genserve.engine.vllm.launch import EngineOptions, configured
from genserve.engine.vllm.openai import flags as openai_flags
from genserve.engine.vllm.requests.intake import IntakeLimits
from genserve.engine.vllm.start import config as vllm_config
from genserve.engine.vllm.start.clients import Clients
from genserve.engine.vllm.start.failure import EngineConfigError, EngineStartError, Report
from genserve.settings.config import ServeConfig, check_model

_DESCRIPTION = (
    "Serve a model over gRPC: stream tokens, receive weights, pause and resume. "
    "--help=genserve shows the daemon's own flags, --help=all every flag, --help=max-model-len those of a name."
)


def parse(argv: Sequence[str]) -> tuple[ServeConfig, argparse.Namespace]:
    """The daemon's settings, and all flags. Wrong flags raise SystemExit, as argparse does."""
    parser = vllm_config.parser("genserve serve", _DESCRIPTION)
    ServeConfig.add_flags(parser)
    openai_flags.add_flags(parser)
    flags = parser.parse_args(argv)
    try:
        config = ServeConfig.from_flags(vars(flags))
        if flags.model is not None:
            elsewhere = flags.hf_config_path is not None or flags.config_format != "auto"
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
