"""Options that several commands share: address of the daemon, pause mode, times."""

import argparse
import getpass
import re
import shlex
import socket
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, cast, get_args

from genserve.net import DEFAULT_TARGET
from genserve.settings.flags import seconds
from genserve.wire.literals import KvPolicy, PauseMode, PrepareMode, SleepTag

if TYPE_CHECKING:
    from genserve.client import ApplyOptions, AsyncClient, Client, ConnectionSettings

Subparsers = argparse._SubParsersAction  # argparse has no public name for what add_subparsers returns

PAUSE_MODES: Final = get_args(PauseMode)
SLEEP_TAGS: Final = get_args(SleepTag)
KV_POLICIES: Final = get_args(KvPolicy)
PREPARE_MODES: Final = get_args(PrepareMode)

_MAX_COUNT: Final = 1_000_000
_LIKENESS: Final = 0.7
_ACCESS: Final = ("tls", "ca_file", "cert_file", "key_file", "server_name", "token_file", "allow_insecure")
_NEXT: Final = re.compile(r".*: genserve (?:resume|wake-up)(?: \S+)?", re.DOTALL)
"""What ends with a command that helps."""


def add_connection_options(
    parser: argparse.ArgumentParser, *, of: str = "the daemon", target: str = DEFAULT_TARGET
) -> None:
    """Adds --target, --uds, and the flags of TLS and of the token. `of`: the server that is called. `target`: its
    default address."""
    group = parser.add_argument_group(
        "connection",
        "What is not given here comes from $GENSERVE_TARGET, $GENSERVE_CA_FILE and so on, or from the file "
        "~/.config/genserve/client.toml.",
    )
    parser.set_defaults(default_target=target)
    where = group.add_mutually_exclusive_group()
    where.add_argument("--target", metavar="ADDRESS", help=f"address of {of} (default: {target})")
    where.add_argument("--uds", metavar="PATH", help=f"Unix domain socket of {of}")
    group.add_argument("--tls", action="store_true", default=None, help="use TLS with the system's root certificates")
    group.add_argument("--ca-file", metavar="FILE", help=f"use TLS, with the authorities of {of} in this PEM file")
    group.add_argument("--cert-file", metavar="FILE", help="own certificate and its chain, if one is required (PEM)")
    group.add_argument("--key-file", metavar="FILE", help="its key, unless --cert-file has it (PEM)")
    group.add_argument("--server-name", metavar="NAME", help=f"name in the certificate of {of}, if not its address")
    group.add_argument(
        "--token-file", metavar="FILE", help="file with the bearer token; $GENSERVE_TOKEN can have the token itself"
    )
    group.add_argument(
        "--allow-insecure", action="store_true", default=None, help="send the token without TLS to another host, too"
    )


def add_pause_options(parser: argparse.ArgumentParser, *, flag_prefix: str, kv_default: str) -> None:
    """Adds --mode (or --pause-mode) and --kv-policy."""
    parser.add_argument(
        f"--{flag_prefix}mode",
        choices=PAUSE_MODES,
        help="requests in flight: freeze them, let them finish first, or end them (default: keep)",
    )
    parser.add_argument(
        "--kv-policy", choices=KV_POLICIES, help=f"what to do with the KV cache (default: {kv_default})"
    )


def add_timeout(parser: argparse.ArgumentParser, default_s: float = 600.0, what: str = "deadline") -> None:
    """Adds --timeout. `what`: what it limits, for the help."""
    parser.add_argument(
        "--timeout", type=seconds, default=default_s, metavar="TIME", help=f"{what} (default: {default_s:g}s)"
    )


def add_tags(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds --tag, which names a part of the engine. `what`: what is done to it, for the help."""
    parser.add_argument(
        "--tag",
        action="append",
        choices=SLEEP_TAGS,
        dest="tags",
        help=f"{what}. May be repeated (default: all)",
    )


def add_apply_options(parser: argparse.ArgumentParser) -> None:
    """Adds how a push is applied: --expected-version, --pause-mode, --kv-policy, --lease and --prepare-mode."""
    parser.add_argument("--expected-version", type=int, metavar="N", help="refuse unless this version is served")
    add_pause_options(parser, flag_prefix="pause-", kv_default="recompute")
    parser.add_argument(
        "--lease", default="", metavar="ID", help="apply under this pause lease and leave the engine paused"
    )
    parser.add_argument(
        "--prepare-mode",
        choices=PREPARE_MODES,
        help="generation while the version is prepared: running, or paused, which is soonest done (default: running)",
    )


def apply_options(args: argparse.Namespace) -> "ApplyOptions":
    """The options of `add_apply_options` as keyword arguments of the client."""
    return {
        "expected_version": args.expected_version,
        "pause_mode": args.pause_mode,
        "kv_policy": args.kv_policy,
        "pause_lease_id": args.lease,
        "prepare_mode": args.prepare_mode,
    }


def open_client(args: argparse.Namespace) -> "Client":
    """A client for the daemon that the options name."""
    from genserve.client import Client

    return Client(shown_target(args), **_access(args))


def open_async_client(args: argparse.Namespace) -> "AsyncClient":
    """The same for asyncio."""
    from genserve.client import AsyncClient

    return AsyncClient(shown_target(args), **_access(args))


def unrecognized(arguments: Sequence[str], known: Collection[str]) -> str:
    """That these are no arguments, with the known flags that may have been meant."""
    flags = [flag[2:] for flag in known if flag.startswith("--")]
    names = [each.partition("=")[0][2:] for each in arguments if each.startswith("--")]
    names = [name for name in names if name not in ("", *flags)]  # without "--", and a flag that follows it
    meant: list[str] = []
    for name in names:
        begins = [flag for flag in flags if flag.startswith(name)]
        meant += begins or get_close_matches(name.replace("_", "-"), flags, n=1, cutoff=_LIKENESS)
    asked = f" (did you mean {', '.join(f'--{each}' for each in dict.fromkeys(meant))}?)" if meant else ""
    return f"unrecognized arguments: {' '.join(arguments)}{asked}"


def count(text: str) -> int:
    """Parses a number of things, from 1 to a million."""
    if not (re.fullmatch("[0-9]{1,7}", text) and 0 < int(text) <= _MAX_COUNT):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {_MAX_COUNT}")
    return int(text)


def counts(text: str) -> list[int]:
    """Parses such numbers, separated by commas."""
    return [count(part.strip()) for part in text.split(",")]


def default_holder() -> str:
    """user@host"""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def to_the_same(text: str, args: argparse.Namespace) -> str:
    """A text that ends with a command for the daemon, which has no other address: with the flags by which this command
    has found it, as the next one does not find it without them."""
    return text if _NEXT.fullmatch(text) is None else f"{text}{connection_flags(args)}"


def connection_flags(args: argparse.Namespace) -> str:
    """The flags by which a command has found its daemon, each after a space."""
    flags = ""
    for name in ("target", "uds", *_ACCESS):
        if (value := getattr(args, name, None)) is not None:
            flags += f" --{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(value)}")
    return flags


def shown_target(args: argparse.Namespace) -> str:
    from genserve.transport.settings import target_of

    named = f"unix:{args.uds}" if args.uds is not None else args.target
    return target_of(named, default=args.default_target)


def _access(args: argparse.Namespace) -> "ConnectionSettings":
    given = {name: value for name in _ACCESS if (value := getattr(args, name)) is not None}
    return cast("ConnectionSettings", given)
