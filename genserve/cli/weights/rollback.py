"""`genserve rollback`: makes the daemon serve the version before."""

import argparse

from genserve.cli.options import (
    Subparsers,
    add_apply_options,
    add_connection_options,
    apply_options,
    open_client,
    seconds,
)
from genserve.cli.weights.push import print_result


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "rollback",
        help="make the daemon serve the version before",
        description="Makes the daemon serve the version before the served one, while it serves: from the disk of a "
        "daemon with --keep-committed, or what another daemon serves. A second rollback undoes the first.",
    )
    parser.add_argument("--peer", metavar="HOST:PORT", default="", help="the other daemon")
    parser.add_argument("--version", type=int, metavar="N", help="refuse unless it is this version")
    parser.add_argument("--expected-version", type=int, metavar="N", help="refuse unless this version is served")
    add_apply_options(parser)
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="TIME", help="deadline (default: 600s)")
    parser.add_argument("--json", action="store_true", help="print the outcome as protobuf JSON")
    parser.set_defaults(action="apply")
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Rolls back, and prints the steps."""
    with open_client(args) as client:
        result = client.load_weights(
            peers=[args.peer] if args.peer else [],
            previous=not args.peer,
            version=args.version,
            force=True,
            timeout_s=args.timeout,
            **apply_options(args),
        )
    return print_result(result, args)
