"""`genserve up`: a router and its replicas, as processes on this host or on a Ray cluster."""

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from genserve.cli.config_file import with_config_file
from genserve.cli.options import Subparsers, count
from genserve.cli.route import (
    CONFIG_HELP,
    SWITCHES,
    RayMissingError,
    add_ray_flags,
    add_router_flags,
    make_config,
    ray_config,
)
from genserve.cli.serve import check_flags, switches, with_model_flag
from genserve.errors import GenserveError
from genserve.extras import pip_install
from genserve.net import joined
from genserve.placement.config import START_TIMEOUT_S, UpConfig
from genserve.settings.flags import seconds

_USAGE: Final = "genserve up [MODEL] --replicas N [flags of the router] [flags of genserve serve]"
_DESCRIPTION: Final = (
    "Starts N daemons (genserve serve) as processes on this host, or with --ray on nodes of a cluster, and a router "
    "for them, which clients talk to. "
    "A daemon that ends is started again, and gets no requests until it has fetched the weights of the others. Ctrl-C "
    "or SIGTERM lets the router drain and then every daemon. All flags that are not listed here go to each daemon: "
    "genserve serve --help shows them."
)


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command. `parse` parses its flags, because the others are those of `genserve serve`."""
    parser = subparsers.add_parser(
        "up",
        help="run a router and its replicas (takes the flags of serve)",
        usage=_USAGE,
        description=_DESCRIPTION,
    )
    _add_flags(parser)
    parser.set_defaults(run=run)


def parse(flags: Sequence[str]) -> argparse.Namespace:
    """The router's flags, and the rest as `flags`. Wrong usage and `--help` raise SystemExit, as argparse does."""
    # No abbreviations: they could be flags of the engine.
    parser = argparse.ArgumentParser(prog="genserve up", usage=_USAGE, description=_DESCRIPTION, allow_abbrev=False)
    _add_flags(parser)
    try:
        flags = with_config_file(with_model_flag(flags), [*switches(), *SWITCHES])
    except ValueError as error:
        parser.error(str(error))
    ours = parser._option_string_actions
    # As in vLLM's parser, which gets the others: underscores are accepted.
    names = [(flag, flag.partition("=")[0]) for flag in flags]
    args, others = parser.parse_known_args(
        [name.replace("_", "-") + flag[len(name) :] if name.replace("_", "-") in ours else flag for flag, name in names]
    )
    args.flags, args.run, args.ours = others, run, tuple(ours)
    return args


def run(args: argparse.Namespace) -> int:
    """Runs until a signal, or until no replica can be started. Returns the exit status."""
    config = check_flags(args.flags, "genserve up", args.ours)
    try:
        import uvloop

        from genserve.placement.ray.up import up_on_ray
        from genserve.placement.up import up
    except ModuleNotFoundError as error:
        print(f"genserve: the router is not installed ({error}): {pip_install('route')}", file=sys.stderr)
        return 1
    try:
        if config is not None and config.headless:
            raise ValueError("--headless: the workers of another host are no replica")
        if config is not None and config.openai_port > 0:
            raise ValueError("--openai-port: every replica would listen there; 0 gives each a free port")
        route, ray = make_config(args), ray_config(args)
        wanted = UpConfig(args.replicas, args.flags, args.gpus_per_replica, route, args.start_timeout)
        if config is not None and config.check:
            if ray is not None:
                raise ValueError("--check: looks at this host, which Ray may not use: leave --ray out")
            return _check(wanted)
        return uvloop.run(up(wanted) if ray is None else up_on_ray(wanted, ray))
    except RayMissingError as error:
        print(f"genserve: {error}", file=sys.stderr)
        return 1
    except (ValueError, GenserveError) as error:
        print(f"genserve up: error: {error}", file=sys.stderr)
        return 2


def _check(wanted: UpConfig) -> int:
    """Prints a line for each check of a start of the router and of one replica; the exit status."""
    from genserve.cli.serve import print_findings
    from genserve.doctor.verdict import Finding
    from genserve.installed_engine import EngineNotUsableError, installed_engine
    from genserve.net import require_free
    from genserve.placement.config import flags_of_replica
    from genserve.placement.shares import process_shares
    from genserve.placement.up import daemon_flags

    route = wanted.route
    status = 0
    try:
        require_free(route.host, route.port, route.uds)
        require_free(route.host, route.metrics_port, flag="--metrics-port")
    except OSError as error:
        print(Finding("router", False, str(error)), flush=True)
        status = 1
    else:
        listened = [f"unix:{route.uds}"] if route.uds else []
        listened += [joined(route.host, route.port)] if route.port != -1 else []
        print(Finding("router", True, f"{', '.join(listened)} can be listened on"), flush=True)
    shares = process_shares(wanted.flags, wanted.num_replicas, wanted.gpus_each)
    words = "; ".join(each.words for each in shares if each.words) or "none has GPUs or CPUs of its own"
    print(Finding("replicas", True, f"{wanted.num_replicas}: {words}"), flush=True)
    try:
        engine = installed_engine()
    except EngineNotUsableError as error:
        print(f"genserve: {error}", file=sys.stderr)
        return 1
    flags = flags_of_replica(daemon_flags(wanted), 0)
    config = check_flags(flags, "genserve up")
    return status if config is None else max(status, print_findings(config, flags, engine))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
    replicas = parser.add_argument_group("replicas")
    replicas.add_argument("--replicas", type=count, metavar="N", required=True, help="number of daemons to run")
    replicas.add_argument(
        "--gpus-per-replica",
        type=count,
        metavar="K",
        help="GPUs of each daemon, one after the other of $CUDA_VISIBLE_DEVICES or of all (default: the product of the "
        "engine's parallel sizes)",
    )
    replicas.add_argument(
        "--start-timeout",
        type=seconds,
        default=START_TIMEOUT_S,
        metavar="TIME",
        help="a daemon that does not serve within this time is ended, and started again (default: "
        f"{START_TIMEOUT_S / 60:g}m)",
    )
    add_ray_flags(replicas, "run them on this Ray cluster, as actors, and not on this host")
    add_router_flags(parser)
