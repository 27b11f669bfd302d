"""`genserve route`: one endpoint for many daemons."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from genserve.cli.options import Subparsers
from genserve.errors import GenserveError
from genserve.extras import pip_install
from genserve.fleet.config import FleetSettings, RouteConfig
from genserve.placement.ray.settings import AUTO, DEFAULT_NAME, DEFAULT_TIMEOUT_S, RayConfig
from genserve.security.access import environment_lists_callers
from genserve.settings.flags import add_flags, seconds, switches_of, values_of
from genserve.settings.listen_config import ListenConfig

CONFIG_HELP = "a YAML file with flags under their names; flags on the command line take precedence"
SWITCHES = switches_of(RouteConfig)
REPEATED = ("--replica", "--dns")
"""Flags that are given once for each value."""


class RayMissingError(Exception):
    """The package that these flags need is not installed."""


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "route",
        help="run a router: one endpoint for many daemons",
        description="Serves many daemons, which are its replicas, as if they were one: requests go to the replica that "
        "has their prefix or least to do, a push goes to all and is applied on all or on none, and a replica that "
        "does not serve the version of the others gets no requests until it has fetched it.",
    )
    parser.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
    replicas = parser.add_argument_group("replicas", "More can be added while it runs: genserve replicas add.")
    replicas.add_argument(
        "--replica", metavar="HOST:PORT", action="append", default=[], help="a daemon; may be repeated"
    )
    replicas.add_argument(
        "--dns",
        metavar="NAME:PORT",
        action="append",
        default=[],
        help="all daemons that a name resolves to, now and later; may be repeated",
    )
    add_ray_flags(replicas, "all daemons that genserve up --ray runs on this Ray cluster, now and later")
    add_router_flags(parser)
    parser.set_defaults(run=run)


def add_ray_flags(group: "argparse._ArgumentGroup", what: str) -> None:
    """Adds --ray, --ray-name and --ray-timeout, all None if they are not given. `what`: what --ray means."""
    group.add_argument(
        "--ray",
        nargs="?",
        const=AUTO,
        metavar="ADDRESS",
        help=f"{what}; this host is a node of it (default of ADDRESS: $RAY_ADDRESS, or the cluster of this host)",
    )
    group.add_argument(
        "--ray-name",
        metavar="NAME",
        help=f"name of the fleet, if the cluster has several (default: {DEFAULT_NAME})",
    )
    group.add_argument(
        "--ray-timeout",
        type=seconds,
        metavar="TIME",
        help="how long Ray may take to place the replicas, or to answer; more if it has to start nodes first (default: "
        f"{DEFAULT_TIMEOUT_S:g}s)",
    )


def ray_config(args: argparse.Namespace) -> RayConfig | None:
    """The settings from these flags; None without --ray. Raises ValueError, and RayMissingError."""
    if args.ray is None:
        for flag, value in (("--ray-name", args.ray_name), ("--ray-timeout", args.ray_timeout)):
            if value is not None:
                raise ValueError(f"{flag}: needs --ray")
        return None
    if importlib.util.find_spec("ray") is None:  # imports nothing
        raise RayMissingError(f"Ray is not installed: {pip_install('ray')}")
    return RayConfig(
        (os.environ.get("RAY_ADDRESS") or AUTO) if args.ray == AUTO else args.ray,
        DEFAULT_NAME if args.ray_name is None else args.ray_name,
        DEFAULT_TIMEOUT_S if args.ray_timeout is None else args.ray_timeout,
    )


def add_router_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a router, all but those that name its replicas."""
    default = RouteConfig()
    fleet = default.fleet
    listening = parser.add_argument_group("where it listens, and who may call it")
    add_flags(listening, RouteConfig, of=ListenConfig, tells_default=True)
    parser.add_argument(
        "--policy",
        default=default.policies,
        metavar="NAME,NAME",
        help="how a replica is chosen: session, prefix-aware, requests, kv-cache, power-of-two, round-robin; the first "
        "that decides wins (default: %(default)s)",
    )
    parser.add_argument(
        "--overload-threshold",
        type=float,
        default=default.overload_threshold,
        metavar="X",
        help="a replica with more than X times the mean number of sequences gets no more requests for the prefixes "
        "that it has (default: %(default)s)",
    )
    parser.add_argument(
        "--fanout",
        type=int,
        default=fleet.fanout,
        metavar="N",
        help="replicas that one replica passes a push on to; 1 = a chain (default: %(default)s)",
    )
    parser.add_argument(
        "--min-replicas",
        type=int,
        default=fleet.min_replicas,
        metavar="N",
        help="replicas that have to take a push; the others fetch it later. 0 = all (default: %(default)s)",
    )
    _add_time(parser, "--silence", fleet.silence_s, "time without a message after which a replica counts as dead")
    _add_time(parser, "--wait-ready", fleet.wait_ready_s, "how long a request waits for a replica that may serve it")
    _add_time(
        parser, "--settle", fleet.settle_s,
        "how long to wait for all replicas after the first answer, before those that have answered decide the version "
        "of the fleet",
    )  # fmt: skip
    _add_time(parser, "--drain-timeout", default.drain_timeout_s, "time limit of a shutdown")
    _add_time(
        parser, "--write-timeout", default.write_timeout_s,
        "time that a client may take to read a message of tokens before its stream ends; 0s = no limit",
    )  # fmt: skip


def _add_time(parser: argparse.ArgumentParser, flag: str, default_s: float, help: str) -> None:
    parser.add_argument(flag, type=seconds, default=default_s, metavar="TIME", help=f"{help} (default: {default_s:g}s)")


def make_config(args: argparse.Namespace, replicas: Sequence[str] = (), dns: Sequence[str] = ()) -> RouteConfig:
    """The settings of a router from its flags. Raises ValueError."""
    settings = FleetSettings(
        silence_s=args.silence,
        settle_s=args.settle,
        wait_ready_s=args.wait_ready,
        fanout=args.fanout,
        min_replicas=args.min_replicas,
    )
    return RouteConfig(
        replicas=replicas,
        dns=dns,
        policies=args.policy,
        overload_threshold=args.overload_threshold,
        drain_timeout_s=args.drain_timeout,
        write_timeout_s=args.write_timeout,
        fleet=settings,
        environment_lists_callers=environment_lists_callers(os.environ),
        **values_of(ListenConfig, vars(args)),
    )


def run(args: argparse.Namespace) -> int:
    """Routes until a signal. Returns the exit status."""
    try:
        import uvloop

        from genserve.fleet.serve import serve
        from genserve.placement.ray.up import ray_addresses
        from genserve.security.access_list import take_environment
    except ModuleNotFoundError as error:
        print(f"genserve: the router is not installed ({error}): {pip_install('route')}", file=sys.stderr)
        return 1
    try:
        config, ray = make_config(args, args.replica, args.dns), ray_config(args)
        finding = {} if ray is None else {f"{ray.name} on {ray.where}": ray_addresses(ray)}
        return uvloop.run(serve(config, finding, take_environment()))
    except RayMissingError as error:
        print(f"genserve: {error}", file=sys.stderr)
        return 1
    except (ValueError, GenserveError) as error:
        print(f"genserve route: error: {error}", file=sys.stderr)
        return 2
