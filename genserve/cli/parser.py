"""The parser of a command: what it says of a flag that does not exist."""

import argparse
from collections.abc import Iterable
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """argparse leaves unknown flags to the parser of all commands, which prints its own usage, and tells first which
    arguments are missing. This one names an unknown flag first, with the usage of its own command."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, but exits if a flag is unknown."""
        args = None if args is None else list(args)  # read twice
        groups = self._mutually_exclusive_groups
        required: list[Any] = [each for each in (*self._actions, *groups) if getattr(each, "required", False)]
        for each in required:
            each.required = False
        try:
            _, unknown = super().parse_known_args(args)
        finally:
            for each in required:
                each.required = True
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return super().parse_known_args(args, namespace)
