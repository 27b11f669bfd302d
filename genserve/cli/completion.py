"""`genserve completion`: prints what makes a shell complete genserve's commands and flags."""

import argparse
import sys
from typing import Any, Final

from genserve.cli.options import Subparsers

SHELLS: Final = ("bash", "zsh", "fish")
_FILES: Final = frozenset({"--config", "--model", "--uds"})
_EPILOG: Final = """\
the line for ~/.bashrc:  source <(genserve completion bash)
those for ~/.zshrc:      autoload -Uz compinit; compinit; eval "$(genserve completion zsh)"
for fish:                genserve completion fish > ~/.config/fish/completions/genserve.fish"""


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "completion",
        help="print completions for a shell",
        description="Prints a script that makes a shell complete genserve's commands and flags. Of vLLM's flags it "
        "knows --model alone.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the script."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        print(f"genserve: {error}: pip install shtab", file=sys.stderr)
        return 1
    parser = complete_parser()
    for action in _actions(parser):
        if not _FILES.isdisjoint(action.option_strings):
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # how shtab is told
    print(shtab.complete(parser, shell=args.shell))
    return 0


def complete_parser() -> argparse.ArgumentParser:
    """The parser of all commands, with the flags of `serve`, which are parsed elsewhere."""
    from genserve.cli import make_parser
    from genserve.settings.config import ServeConfig

    parser = make_parser()
    commands = _commands(parser)
    for name in ("serve", "up"):
        passed_on = commands[name]
        ours = set(passed_on._option_string_actions)
        if name == "serve":
            passed_on._actions[:] = []  # the rest of the line
            passed_on.add_argument("--config", help="a YAML file with flags under their names")
        passed_on.add_argument("name_of_model", nargs="?", metavar="MODEL", help="as --model")
        passed_on.add_argument("--model", help="a checkpoint's directory, or its name on the hub")
        flags = argparse.ArgumentParser(add_help=False)
        ServeConfig.add_flags(flags)
        for action in flags._actions:
            if ours.isdisjoint(action.option_strings):
                passed_on._add_action(action)
    return parser


def _commands(parser: argparse.ArgumentParser) -> dict[str, Any]:
    (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return dict(action.choices)


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [each for command in action.choices.values() for each in _actions(command)]
    return found
