"""`genserve route`: one endpoint for many daemons."""

import argparse
import sys
from collections.abc import Sequence

from genserve.cli.options import Subparsers, seconds
from genserve.errors import GenserveError
from genserve.fleet.config import RouteConfig
from genserve.fleet.settings import FleetSettings


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "route",
        help="run a router: one endpoint for many daemons",
        description="Serves many daemons, which are its replicas, as if they were one: requests go to the replica that "
        "has their prefix or least to do, a push goes to all and is applied on all or on none, and a replica that "
        "does not serve the version of the others gets no requests until it has fetched it.",
    )
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
    add_router_flags(parser)


def add_router_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a router, all but those that name its replicas."""
    default = RouteConfig()
    fleet = default.fleet
    listening = parser.add_argument_group("where it listens")
    listening.add_argument("--host", default=default.host, help="address to listen on (default: %(default)s)")
    listening.add_argument(
        "--port",
        type=int,
        default=default.port,
        help="TCP port; 0 picks a free one, -1 listens only on --uds (default: %(default)s)",
    )
    listening.add_argument("--uds", default=default.uds, metavar="PATH", help="a Unix socket to listen on in addition")
    listening.add_argument(
        "--allow-insecure", action="store_true", help="listen on an address that others can reach, without TLS"
    )
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
    _add_time(parser, "--silence", fleet.silence_s, "a replica that says nothing for so long is taken to be dead")
    _add_time(parser, "--wait-ready", fleet.wait_ready_s, "how long a request waits for a replica that may serve it")
    _add_time(
        parser, "--settle", fleet.settle_s,
        "how long to wait, at the start, for all replicas, before the version of the fleet is told from those that "
        "have answered",
    )  # fmt: skip
    _add_time(parser, "--drain-timeout", default.drain_timeout_s, "limit of a shutdown")


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
        host=args.host,
        port=args.port,
        uds=args.uds,
        allow_insecure=args.allow_insecure,
        policies=args.policy,
        overload_threshold=args.overload_threshold,
        drain_timeout_s=args.drain_timeout,
        fleet=settings,
    )


def run(args: argparse.Namespace) -> int:
    """Routes until a signal. Returns the exit status."""
    try:
        import uvloop

        from genserve.fleet.serve import serve
    except ModuleNotFoundError as error:
        print(f'genserve: the router is not installed ({error}): pip install "genserve[route]"', file=sys.stderr)
        return 1
    try:
        return uvloop.run(serve(make_config(args, args.replica, args.dns)))
    except (ValueError, GenserveError) as error:
        print(f"genserve route: error: {error}", file=sys.stderr)
        return 2
