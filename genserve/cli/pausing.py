"""`genserve pause` and `resume`, `sleep` and `wake-up`, and `drain`: what stops generation, and what lets it go on."""

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from genserve.cli.options import (
    PAUSE_MODES,
    Subparsers,
    add_connection_options,
    add_pause_options,
    add_tags,
    add_timeout,
    default_holder,
    open_client,
    to_the_same,
)
from genserve.cli.status import state_line
from genserve.settings.flags import seconds

if TYPE_CHECKING:
    from genserve.client import PauseLease

_LOOKS_S: Final = 0.5


def add_parsers(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the commands."""
    _add_pause(subparsers)
    _add_resume(subparsers)
    _add_sleep(subparsers)
    _add_wake_up(subparsers)
    _add_drain(subparsers)


def _add_pause(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds `genserve pause`."""
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
    add_timeout(parser, 60.0, "longest wait for the pause to begin")
    add_connection_options(parser)
    parser.set_defaults(run=_pause)


def _pause(args: argparse.Namespace) -> int:
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
    print(f"paused: lease {paused.lease.lease_id}, {_end_of(paused.lease)}")
    print(f"requests kept: {paused.requests_kept}, ended: {paused.requests_aborted}")
    print(to_the_same(f"resume with: genserve resume {paused.lease.lease_id}", args))
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


def _end_of(lease: "PauseLease") -> str:
    if lease.expire_time is None:
        return "never expires"
    return f"until {lease.expire_time.astimezone():%H:%M:%S}"


def _add_resume(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds `genserve resume`."""
    parser = subparsers.add_parser("resume", help="end a pause", description="Ends a pause.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("lease_id", metavar="LEASE", nargs="?", help="the lease that `genserve pause` printed")
    which.add_argument("--force", action="store_true", help="end every pause, whoever holds it")
    add_connection_options(parser)
    parser.set_defaults(run=_resume)


def _resume(args: argparse.Namespace) -> int:
    """Resumes and says whether the engine runs."""
    with open_client(args) as client:
        resumed = client.resume("" if args.force else args.lease_id, force=args.force)
    if resumed.lease_expired:
        print("the lease had expired: the engine may have run meanwhile", file=sys.stderr)
    others = "".join(f"; {lease.lease_id} of {lease.holder} is still held" for lease in resumed.state.pauses)
    print(f"{resumed.state.phase}{others}")
    return 0


def _add_sleep(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds `genserve sleep`."""
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
    add_tags(parser, "release only this part; weights only together with kv_cache")
    parser.add_argument(
        "--mode", choices=PAUSE_MODES, help="requests in flight: freeze, let finish, or end them (default: keep)"
    )
    add_timeout(parser, 60.0, "longest wait for the engine to fall asleep")
    add_connection_options(parser)
    parser.set_defaults(run=_sleep)


def _sleep(args: argparse.Namespace) -> int:
    """Puts the engine to sleep and prints what is asleep."""
    with open_client(args) as client:
        state = client.sleep(args.mode, level=args.level, tags=args.tags or (), timeout_s=args.timeout)
    print(state_line(state))
    return 0


def _add_wake_up(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds `genserve wake-up`."""
    parser = subparsers.add_parser(
        "wake-up",
        help="end a sleep",
        description="Allocates the device's memory again. Dropped weights are restored before anything runs.",
    )
    add_tags(parser, "wake up only this part")
    add_timeout(parser, 300.0, "longest wait for the engine to wake up")
    add_connection_options(parser)
    parser.set_defaults(run=_wake_up)


def _wake_up(args: argparse.Namespace) -> int:
    """Wakes the engine up and prints what is still asleep."""
    with open_client(args) as client:
        state = client.wake_up(args.tags or (), timeout_s=args.timeout)
    print(state_line(state))
    return 0


def _add_drain(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds `genserve drain`."""
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
    parser.set_defaults(run=_drain)


def _drain(args: argparse.Namespace) -> int:
    """Begins the shutdown and prints what still runs."""
    with open_client(args) as client:
        state = client.drain(drain_timeout_s=args.drain_timeout)
    print(f"{state.phase}: {state.running_requests} running, {state.waiting_requests} waiting")
    return 0
