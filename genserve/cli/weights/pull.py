"""`genserve pull`: saves the served weights to a file."""

import argparse
import sys
import time
from pathlib import Path

from genserve.cli.options import Subparsers, add_connection_options, open_client, seconds
from genserve.cli.weights.push import ProgressDisplay


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "pull", help="save the served weights", description="Saves the weights that the daemon serves."
    )
    parser.add_argument("path", metavar="FILE", type=Path, help="a .safetensors file; an existing file is replaced")
    parser.add_argument("--version", type=int, metavar="N", help="refuse unless this version is served")
    parser.add_argument("--timeout", type=seconds, default=600.0, metavar="TIME", help="deadline (default: 600s)")
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Pulls with progress on stderr, and writes the complete file or nothing."""
    from genserve.client import PushProgress

    if not args.path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{args.path.parent}: no such directory")  # reported before gigabytes are moved
    display, began_s = ProgressDisplay(sys.stderr), time.monotonic()

    def show(received_bytes: int, total_bytes: int) -> None:
        display.show(PushProgress("", received_bytes, total_bytes, time.monotonic() - began_s, 0))

    with open_client(args) as client:
        try:
            pulled = client.pull_weights(version=args.version, progress=show, timeout_s=args.timeout)
        finally:
            display.end()
    pulled.save(args.path)
    print(f"version {pulled.weight_version}: {pulled.total_bytes / 1e9:.2f} GB in {args.path}")
    return 0
