"""`genserve wake-up`: allocates the device's memory again after `genserve sleep`."""

import argparse

from genserve.cli.control.status import state_line
from genserve.cli.options import SLEEP_TAGS, Subparsers, add_connection_options, open_client, seconds


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "wake-up",
        help="end a sleep",
        description="Allocates the device's memory again. Dropped weights are restored before anything runs.",
    )
    parser.add_argument(
        "--tag",
        action="append",
        choices=SLEEP_TAGS,
        dest="tags",
        help="wake up only this part. May be repeated (default: all)",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=300.0,
        metavar="TIME",
        help="longest wait for the engine to wake up (default: 300s)",
    )
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Wakes the engine up and prints what is still asleep."""
    with open_client(args) as client:
        state = client.wake_up(args.tags or (), timeout_s=args.timeout)
    print(state_line(state))
    return 0
