"""`genserve commit`, `discard`, `load`, `rollback` and `pull`: versions of the weights beside `genserve push`."""

import argparse
import sys
import time
from pathlib import Path

from genserve.cli.options import (
    Subparsers,
    add_apply_options,
    add_connection_options,
    add_timeout,
    apply_options,
    open_client,
)
from genserve.cli.push import ProgressDisplay, add_push_options, print_outcome, print_result, push_options, version_of


def add_parsers(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the commands."""
    _add_commit(subparsers)
    _add_discard(subparsers)
    _add_load(subparsers)
    _add_rollback(subparsers)
    _add_pull(subparsers)


def _add_commit(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds `genserve commit`."""
    parser = subparsers.add_parser(
        "commit",
        help="apply a staged or prepared push",
        description="Applies a push that `genserve push` staged (--stage) or prepared (--prepare).",
    )
    parser.add_argument("push_id", metavar="PUSH", help="the push that `genserve push` printed")
    add_apply_options(parser)
    add_timeout(parser)
    add_connection_options(parser)
    parser.set_defaults(run=_commit)


def _commit(args: argparse.Namespace) -> int:
    """Commits, and prints the steps."""
    with open_client(args) as client:
        result = client.commit_push(
            args.push_id,
            timeout_s=args.timeout,
            **apply_options(args),
        )
    print_outcome(result)
    return 0


def _add_discard(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds `genserve discard`."""
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
    parser.set_defaults(run=_discard)


def _discard(args: argparse.Namespace) -> int:
    """Discards the push and prints how many bytes it had."""
    with open_client(args) as client:
        push = client.discard_push(args.push_id, force=args.force)
    print(f"version {push.weight_version}: {push.received_bytes / 1e9:.2f} GB discarded")
    return 0


def _add_load(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds `genserve load`."""
    parser = subparsers.add_parser(
        "load",
        help="make the daemon fetch weights from its disk or from other daemons",
        description="Makes the daemon fetch weights itself, and apply them while it serves.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        default="",
        help="absolute path of a .safetensors file or a checkpoint directory, on the daemon's host",
    )
    source.add_argument(
        "--peer",
        metavar="HOST:PORT",
        action="append",
        default=[],
        help="another daemon that serves them; may be repeated: the next one goes on where one fails",
    )
    parser.add_argument(
        "--peer-push", metavar="ID", default="", help="what the peers have of this push, not what they serve"
    )
    parser.add_argument("--push-id", metavar="ID", default="", help="go on with a load that was interrupted")
    add_push_options(parser, default="the served one + 1; of peers, theirs")
    parser.set_defaults(run=_load)


def _load(args: argparse.Namespace) -> int:
    """Loads, and prints the steps."""
    with open_client(args) as client:
        result = client.load_weights(
            args.path,
            peers=args.peer,
            peer_push_id=args.peer_push,
            push_id=args.push_id,
            version=args.version if args.peer else version_of(args, client),
            timeout_s=args.timeout,
            **push_options(args),
        )
    return print_result(result, args)


def _add_rollback(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds `genserve rollback`."""
    parser = subparsers.add_parser(
        "rollback",
        help="make the daemon serve the version before",
        description="Makes the daemon serve the version before the served one, while it serves: from the disk of a "
        "daemon with --keep-committed, or what another daemon serves. A second rollback undoes the first.",
    )
    parser.add_argument("--peer", metavar="HOST:PORT", default="", help="the other daemon")
    parser.add_argument("--version", type=int, metavar="N", help="refuse unless it is this version")
    add_apply_options(parser)
    add_timeout(parser)
    parser.add_argument("--json", action="store_true", help="print the outcome as protobuf JSON")
    parser.set_defaults(action="apply")
    add_connection_options(parser)
    parser.set_defaults(run=_rollback)


def _rollback(args: argparse.Namespace) -> int:
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


def _add_pull(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds `genserve pull`."""
    parser = subparsers.add_parser(
        "pull", help="save the served weights", description="Saves the weights that the daemon serves."
    )
    parser.add_argument("path", metavar="FILE", type=Path, help="a .safetensors file; an existing file is replaced")
    parser.add_argument("--version", type=int, metavar="N", help="refuse unless this version is served")
    add_timeout(parser)
    add_connection_options(parser)
    parser.set_defaults(run=_pull)


def _pull(args: argparse.Namespace) -> int:
    """Pulls with progress on stderr, and writes the complete file or nothing."""
    from genserve.client import PushProgress

    if not args.path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{args.path.parent}: no such directory")  # reported before gigabytes are moved
    if args.path.is_dir():
        raise IsADirectoryError(f"{args.path}: is a directory: name a file in it")
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
