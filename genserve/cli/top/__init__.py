"""`genserve top`: a daemon, or a router and its replicas, live in a terminal."""

import argparse
import asyncio
import shutil
import sys
import time
from typing import Final

from genserve.cli.options import Subparsers, add_connection_options, open_async_client, shown_target
from genserve.errors import InvalidFieldError, UnsupportedError
from genserve.extras import pip_install
from genserve.settings.flags import seconds

_MIN_COLUMNS: Final = 40


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "top",
        help="show load, versions, pushes and pauses live, and pause, resume or drain by keys",
        description="Shows a daemon, or a router and its replicas, live: load, versions, pushes in flight and pauses. "
        "Keys pause, resume and drain after a question. 80 columns and 24 rows are enough.",
    )
    parser.add_argument("--once", action="store_true", help="print one frame as text, and end; needs no terminal")
    parser.add_argument(
        "--interval", type=seconds, default=0.5, metavar="TIME", help="how often news are wanted (default: 500ms)"
    )
    parser.add_argument(
        "--pause-ttl", type=seconds, default=60.0, metavar="TIME", help="a pause by key ends after this (default: 60s)"
    )
    add_connection_options(parser, of="the daemon or router")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the screen until the user ends it, or prints one frame."""
    from genserve.cli.top.feed import MIN_INTERVAL_S

    if args.interval < MIN_INTERVAL_S:
        raise InvalidFieldError.of("--interval", f"must be at least {MIN_INTERVAL_S:g} s, is {args.interval:g} s")
    if args.once:
        asyncio.run(_print_once(args))
        return 0
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):
        raise UnsupportedError("this needs a terminal: print one frame with --once, or follow genserve status --watch")
    return asyncio.run(_show(args))


async def _print_once(args: argparse.Namespace) -> None:
    from genserve.cli.top.feed import Feed, Pace
    from genserve.cli.top.frame import frame
    from genserve.cli.top.lines import plain
    from genserve.cli.top.screen import Screen

    async with open_async_client(args) as client:
        screen = Screen(shown_target(args), time.monotonic(), args.pause_ttl)
        await Feed(client, screen, Pace(args.interval)).once()
    width = max(_MIN_COLUMNS, shutil.get_terminal_size().columns)
    shown = frame(screen, width, None, time.monotonic(), keys=False)
    print(plain(shown, encoding=sys.stdout.encoding or "ascii"))


async def _show(args: argparse.Namespace) -> int:
    try:
        from genserve.cli.top.app import TopApp
    except ImportError as error:
        raise UnsupportedError(
            f"{error.name} is not installed: {pip_install('top')}, or print one frame with --once"
        ) from error
    from genserve.cli.top.feed import Pace
    from genserve.cli.top.screen import Screen

    async with open_async_client(args) as client:
        app = TopApp(client, Screen(shown_target(args), time.monotonic(), args.pause_ttl), Pace(args.interval))
        await app.run_async()
    return app.return_code or 0
