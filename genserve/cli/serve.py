"""genserve serve: runs the daemon."""

import argparse
import atexit
import gc
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

# At the import, for vLLM's processes too: each of them imports the main script again, and with it this module, before
# it imports anything else.
#
# Objects allocated between collections: Python's default of 700 is less than one step of the engine allocates and
# frees, and a tenth of the start goes into collections that find nothing in what vLLM imports.
gc.set_threshold(20_000)
# The interpreter collects twice when it ends: with torch and vLLM this takes seconds, and at a shutdown one process
# waits for the other.
atexit.register(gc.freeze)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command. The daemon parses its flags, because they include vLLM's and only the daemon imports vLLM."""
    parser = subparsers.add_parser("serve", help="run the daemon (takes vLLM's engine flags)", add_help=False)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the daemon until a signal or a failure; the exit status."""
    _check_own(args.flags)
    # vLLM logs a lot while it starts. The daemon prints what matters; VLLM_LOGGING_LEVEL=INFO shows the rest.
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("TORCH_LOGS", "-all")  # errors alone
        os.environ.setdefault(
            "PYTHONWARNINGS", "ignore::FutureWarning,ignore::UserWarning"
        )  # in the engine's processes
        warnings.simplefilter("ignore", FutureWarning)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from genserve import daemon
    except ModuleNotFoundError as error:
        extras = 'pip install "genserve[cpu]" or "genserve[cuda]"'
        print(f"genserve: the engine is not installed ({error}): {extras}", file=sys.stderr)
        return 1
    return daemon.main(args.flags)


def _check_own(flags: Sequence[str]) -> None:
    """Refuses invalid values of genserve's flags, and a model that does not exist, before vLLM is imported to parse the
    others, which takes seconds. Exits as argparse does."""
    from genserve.config import ServeConfig, check_model

    # As in vLLM's parser: underscores are accepted, and a file may contain more flags.
    dashed = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), flag) for flag in flags]
    if any(flag.partition("=")[0] == "--config" for flag in dashed):
        return
    parser = _OwnFlags(prog="genserve serve", add_help=False, allow_abbrev=False)
    ServeConfig.add_flags(parser)
    parser.add_argument("--model")
    try:
        read = vars(parser.parse_known_args(dashed)[0])
        ServeConfig.from_flags(read)
        if read["model"] is not None:
            check_model(read["model"])
    except ValueError as error:
        parser.error(str(error))


class _OwnFlags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line, because the usage would list genserve's flags only."""
        self.exit(2, f"{self.prog}: error: {message}\n")
