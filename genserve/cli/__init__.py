"""The `genserve` command: `main` runs the subcommand, and turns errors into one line and an exit status.

0 = done, 1 = an error, 2 = wrong usage, 130 = interrupted, 141 = the reader of stdout is gone. A subcommand imports
its modules when it runs, so that `--help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from genserve import __version__
from genserve.cli import (
    bench,
    completion,
    doctor,
    generate,
    lora,
    pausing,
    push,
    replicas,
    route,
    serve,
    status,
    token,
    top,
    up,
    versions,
)
from genserve.cli.config_file import with_config_file
from genserve.cli.options import to_the_same, unrecognized
from genserve.cli.streams import abandon_output, prepare_output
from genserve.errors import GenserveError

_INTERRUPTED: Final = 130
_BROKEN_PIPE: Final = 141
_SERVERS: Final = (["serve"], ["up"], ["route"])
"""The commands whose log has what gRPC says of connections."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand and returns the exit status; wrong usage and `--help` raise SystemExit, as argparse does."""
    prepare_output()
    try:
        try:
            arguments = sys.argv[1:] if argv is None else list(argv)
            if arguments[:1] not in _SERVERS:
                os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # an error is one line, which says what gRPC logs
            return _run(_parse(arguments))
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
    except BrokenPipeError:
        abandon_output()
        return _BROKEN_PIPE
    except OSError as error:  # a full disk
        abandon_output(sys.stdout)
        _print_error("OS_ERROR", str(error))
        return 1


def _run(args: argparse.Namespace) -> int:
    try:
        exit_status: int = args.run(args)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        raise
    except GenserveError as error:
        _print_error(error.metadata.get("reason", error.reason), to_the_same(_with_flags(error), args))
        for violation in error.violations:
            if violation.field not in error.message:
                print(f"  {_printable(violation.field)}: {_printable(violation.description)}", file=sys.stderr)
        return 1
    except OSError as error:
        _print_error("OS_ERROR", str(error))
        return 1
    return exit_status


def _parse(arguments: list[str]) -> argparse.Namespace:
    if arguments[:1] == ["serve"]:  # the engine parses all flags; argparse cannot express this
        return argparse.Namespace(run=serve.run, flags=arguments[1:])
    if arguments[:1] == ["up"]:  # its own flags, and those of serve
        return up.parse(arguments[1:])
    parser = make_parser()
    if arguments[:1] == ["route"]:
        try:
            arguments = ["route", *with_config_file(arguments[1:], route.SWITCHES, route.REPEATED)]
        except ValueError as error:
            print(f"genserve route: error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
    return parser.parse_args(arguments)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands but `serve`."""
    # Its subparsers are of its class.
    parser: argparse.ArgumentParser = CommandParser(
        prog="genserve", description="Serves a model over gRPC and takes new weights while it generates."
    )
    parser.add_argument("--version", action="version", version=f"genserve {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (
        serve.add_parser,
        up.add_parser,
        route.add_parser,
        replicas.add_parser,
        generate.add_parser,
        push.add_parser,
        versions.add_parsers,
        lora.add_parser,
        pausing.add_parsers,
        status.add_parser,
        top.add_parser,
        bench.add_parser,
        doctor.add_parser,
        token.add_parser,
        completion.add_parser,
    ):
        add(subparsers)
    return parser


def _with_flags(error: GenserveError) -> str:
    """The message of an error, in which the client's settings that it names are the flags of commands."""
    from genserve.transport.errors import SETTINGS
    from genserve.transport.unconnected import named

    settings = error.metadata.get(SETTINGS, "").split()
    as_flags = [f"--{name.replace('_', '-')}" for name in settings]
    words = error.message.removesuffix(named(settings))
    return error.message if words == error.message else f"{words}{named(as_flags)}"


def _print_error(reason: str, message: str) -> None:
    print(f"genserve: {_printable(reason)}: {_printable(message)}", file=sys.stderr)


def _printable(text: str) -> str:
    """In one line. A path may have bytes that are no text, and a daemon's answer may have what a terminal obeys."""
    words = " ".join(text.split()).encode(errors="backslashreplace").decode()
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in words)


class CommandParser(argparse.ArgumentParser):
    """argparse leaves unknown flags to the parser of all commands, which prints its own usage, and says first which
    arguments are missing. This one names an unknown flag first, with the usage of its own command."""

    _lifted: Sequence[Any] = ()
    """What is required, but not while unknown flags are looked for."""

    def __init__(self, **settings: Any) -> None:
        settings["allow_abbrev"] = False  # a later version may have another flag of that beginning
        super().__init__(**settings)

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, but exits if a flag is unknown."""
        args = None if args is None else list(args)  # read twice
        parts = (*self._actions, *self._mutually_exclusive_groups)
        self._lifted = [each for each in parts if getattr(each, "required", False)]
        for each in self._lifted:
            each.required = False
        try:
            _, unknown = super().parse_known_args(args)
        finally:
            self._require()
        if unknown:
            self.error(unrecognized(unknown, self._option_string_actions))
        return super().parse_known_args(args, namespace)

    def format_usage(self) -> str:
        """With brackets only around what may be left out, as `format_help`: either is written before an exit."""
        self._require()
        return super().format_usage()

    def format_help(self) -> str:
        """All that there is to know of the command."""
        self._require()
        return super().format_help()

    def _require(self) -> None:
        for each in self._lifted:
            each.required = True
