"""genserve serve: runs the daemon."""

import argparse
import os
import sys
import warnings


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command. Its flags are vLLM's too, so the daemon parses them: only there vLLM is imported."""
    parser = subparsers.add_parser("serve", help="run the daemon (takes vLLM's engine flags)", add_help=False)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the daemon until a signal or a failure; the exit status."""
    # vLLM tells a lot while it starts; what matters comes from us. VLLM_LOGGING_LEVEL=INFO brings it back.
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
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
