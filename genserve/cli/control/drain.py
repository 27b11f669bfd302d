"""`genserve drain`: shuts a daemon or a router down in order."""

import argparse

from genserve.cli.options import Subparsers, add_connection_options, open_client, seconds


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "drain",
        help="shut the daemon down when its requests have ended",
        description="Shuts the daemon down as SIGTERM does: it refuses new calls, lets running requests and pushes "
        "finish, waits until another replica of its fleet has what was pushed, and ends. A router shuts itself "
        "down; `genserve replicas drain` takes a replica out of it.",
    )
    parser.add_argument(
        "--drain-timeout",
        type=seconds,
        metavar="TIME",
        help="time for what runs (default: as the flags of the daemon or router say)",
    )
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Begins the shutdown and prints what still runs."""
    with open_client(args) as client:
        state = client.drain(drain_timeout_s=args.drain_timeout)
    print(f"{state.phase}: {state.running_requests} running, {state.waiting_requests} waiting")
    return 0
