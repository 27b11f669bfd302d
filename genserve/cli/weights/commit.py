"""`genserve commit`: applies a push that is staged or prepared."""

import argparse

from genserve.cli.options import (
    Subparsers,
    add_apply_options,
    add_connection_options,
    apply_options,
    open_client,
    seconds,
)
from genserve.cli.weights.push import print_outcome


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "commit",
        help="apply a staged or prepared push",
        description="Applies a push that `genserve push` staged (--stage) or prepared (--prepare).",
    )
    parser.add_argument("push_id", metavar="PUSH", help="the push that `genserve push` printed")
    parser.add_argument("--expected-version", type=int, metavar="N", help="refuse unless this version is served")
    add_apply_options(parser)
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="TIME", help="deadline (default: 600s)")
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Commits, and prints the steps."""
    with open_client(args) as client:
        result = client.commit_push(
            args.push_id,
            timeout_s=args.timeout,
            **apply_options(args),
        )
    print_outcome(result)
    return 0
