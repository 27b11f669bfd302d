"""`genserve sleep`: releases the device's memory."""

import argparse

from genserve.cli.control.status import state_line
from genserve.cli.options import PAUSE_MODES, SLEEP_TAGS, Subparsers, add_connection_options, open_client, seconds


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "sleep",
        help="release the device's memory until wake-up",
        description="Releases the device's memory. Nothing is generated before `genserve wake-up`.",
    )
    parser.add_argument(
        "--level",
        type=int,
        choices=(0, 1, 2),
        help="0 keeps all memory, 1 keeps the weights on the host and drops the KV cache, 2 drops both (default: 1); "
        "with tags that leave the weights out only 0",
    )
    parser.add_argument(
        "--tag",
        action="append",
        choices=SLEEP_TAGS,
        dest="tags",
        help="release only this part; weights only together with kv_cache. May be repeated (default: all)",
    )
    parser.add_argument(
        "--mode", choices=PAUSE_MODES, help="requests in flight: freeze, let finish, or end them (default: keep)"
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="TIME",
        help="longest wait for the engine to fall asleep (default: 60s)",
    )
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Puts the engine to sleep and prints what is asleep."""
    with open_client(args) as client:
        state = client.sleep(args.mode, level=args.level, tags=args.tags or (), timeout_s=args.timeout)
    print(state_line(state))
    return 0
