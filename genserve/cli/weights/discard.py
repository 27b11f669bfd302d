"""`genserve discard`: frees a push that is staged or prepared."""

import argparse

from genserve.cli.options import Subparsers, add_connection_options, open_client


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "discard", help="free a staged or prepared push", description="Frees a staged or prepared push."
    )
    parser.add_argument("push_id", metavar="PUSH", help="the push that `genserve push` printed")
    parser.add_argument(
        "--force",
        action="store_true",
        help="discard it even while a trainer sends it; that push ends with PUSH_NOT_FOUND",
    )
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Discards the push and prints how many bytes it had."""
    with open_client(args) as client:
        push = client.discard_push(args.push_id, force=args.force)
    print(f"version {push.weight_version}: {push.received_bytes / 1e9:.2f} GB discarded")
    return 0
