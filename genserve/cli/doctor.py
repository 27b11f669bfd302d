"""`genserve doctor`: checks whether this machine can serve a model and take pushes, and what a push costs."""

import argparse
import sys
from typing import Final

from genserve.cli.options import Subparsers
from genserve.errors import InvalidFieldError
from genserve.extras import pip_install_engine
from genserve.settings.config import MAX_TIMEOUT_S
from genserve.settings.flags import seconds

_DEFAULT_TIMEOUT_S: Final = 120.0
_EPILOG: Final = """\
flags after `--` are passed to every daemon, and used to compute which models fit:
  genserve doctor -- --tensor-parallel-size 2 --gpu-memory-utilization 0.8
exit status: 0 = no check fails, 1 = a check fails, 2 = wrong usage"""


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine and a daemon on it",
        description="Checks this machine, with or without a GPU: memory, bandwidth, memory between processes. Then "
        "serves a tiny built-in model in every way, pushes to it under load, and compares its output with cold starts.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="check this checkpoint directory instead; its second version is a copy with one norm scaled",
    )
    parser.add_argument(
        "--ways", metavar="WAY,WAY", help="values of --weight-update to try (default: all that the device supports)"
    )
    parser.add_argument("--machine-only", action="store_true", help="start no daemon")
    parser.add_argument(
        "--timeout",
        type=_limit,
        default=_DEFAULT_TIMEOUT_S,
        metavar="TIME",
        help=f"time limit of each step (default: {_DEFAULT_TIMEOUT_S:g}s)",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for a bug report")
    parser.add_argument("serve_flags", nargs="*", metavar="SERVE_FLAGS", help="flags of `genserve serve`, after --")
    parser.set_defaults(refuse=parser.error)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints each section when it is known, or JSON at the end. Returns the exit status. Ctrl-C leaves no process."""
    try:
        return _run(args)
    except InvalidFieldError as error:  # an exit status of 1 would say that a check fails
        args.refuse(error.message)
        raise


def _run(args: argparse.Namespace) -> int:
    import asyncio
    import importlib.util
    import time

    from genserve.doctor.children import Children
    from genserve.doctor.serve_flags import ServeFlags
    from genserve.doctor.verdict import Section, exit_status, section_lines, summary_line, to_json

    flags = ServeFlags.parse(args.serve_flags)
    if importlib.util.find_spec("numpy") is None:  # the client alone is installed
        print(f"genserve: the doctor needs numpy: {pip_install_engine()}", file=sys.stderr)
        return 1

    from genserve.doctor.checkup import CheckupOptions, check_up

    def show(section: Section) -> None:
        if not args.json:
            print("\n".join(section_lines(section)), flush=True)

    options = CheckupOptions(args.model, args.ways, flags, args.timeout, args.machine_only)
    began_s = time.monotonic()
    with Children() as children:
        try:
            sections, facts = asyncio.run(check_up(options, children, _say, show))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None  # by a signal
    elapsed_s = time.monotonic() - began_s
    print(to_json(sections, facts, elapsed_s) if args.json else summary_line(sections, elapsed_s))
    return exit_status(sections)


def _say(line: str) -> None:
    """Progress: none of it belongs to the report."""
    print(f"genserve: {line}", file=sys.stderr, flush=True)


def _limit(text: str) -> float:
    limit_s = seconds(text)
    if not 0.0 < limit_s <= MAX_TIMEOUT_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0 s and up to 24h")
    return limit_s
