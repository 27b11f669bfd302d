"""`genserve pause`: pauses generation under a lease."""

import argparse
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from genserve.cli.options import (
    Subparsers,
    add_connection_options,
    add_pause_options,
    default_holder,
    open_client,
    seconds,
)

if TYPE_CHECKING:
    from genserve.client import PauseLease


_LOOKS_S: Final = 0.5


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser("pause", help="pause generation", description="Pauses generation under a lease.")
    add_pause_options(parser, flag_prefix="", kv_default="reuse")
    lifetime = parser.add_mutually_exclusive_group()
    lifetime.add_argument(
        "--ttl", type=seconds, default=60.0, metavar="TIME", help="the pause expires after this time (default: 60s)"
    )
    lifetime.add_argument("--no-expiry", action="store_true", help="the pause never expires")
    parser.add_argument(
        "--hold",
        action="store_true",
        help="renew until Ctrl-C or SIGTERM, then resume; ends with an error if the lease is lost",
    )
    parser.add_argument("--holder", help="name of the holder, shown in the status (default: user@host)")
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=60.0,
        metavar="TIME",
        help="longest wait for the pause to begin (default: 60s)",
    )
    add_connection_options(parser)


def run(args: argparse.Namespace) -> int:
    """Pauses and prints the lease; with --hold stays until interrupted."""
    holder = args.holder if args.holder is not None else default_holder()
    with open_client(args) as client:
        if args.hold:
            with (
                _terminated() as terminated,
                client.paused(
                    args.mode, args.kv_policy, holder=holder, ttl_s=args.ttl, timeout_s=args.timeout
                ) as lease,
            ):
                print(f"paused: lease {lease.lease_id}; Ctrl-C resumes", flush=True)
                with contextlib.suppress(KeyboardInterrupt):
                    while not lease.is_lost and not terminated:
                        time.sleep(_LOOKS_S)  # a signal that comes just before a wait does not wake it
            print("resumed")
            return 0
        paused = client.pause(
            args.mode,
            args.kv_policy,
            holder=holder,
            ttl_s=None if args.no_expiry else args.ttl,
            no_expiry=args.no_expiry,
            timeout_s=args.timeout,
        )
    print(f"paused: lease {paused.lease.lease_id}, {_end(paused.lease)}")
    print(f"requests kept: {paused.requests_kept}, ended: {paused.requests_aborted}")
    print(f"resume with: genserve resume {paused.lease.lease_id}")
    return 0


@contextlib.contextmanager
def _terminated() -> Iterator[list[int]]:
    """Gets a number when somebody asks this process to end, which would otherwise end it at once, and leave the pause
    until it expires."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield came  # only the main thread may handle signals
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(lease: "PauseLease") -> str:
    if lease.expire_time is None:
        return "never expires"
    return f"until {lease.expire_time.astimezone():%H:%M:%S}"
