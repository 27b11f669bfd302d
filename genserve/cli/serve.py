"""genserve serve: runs the daemon."""

import argparse
import asyncio
import os
import sys

from genserve.config import ServeConfig

DESCRIPTION = "Serve a model over gRPC: stream generation, take weights, pause and resume."


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command. Its flags are vLLM's too, so they are parsed in `run`: only there vLLM is imported."""
    parser = subparsers.add_parser("serve", help="run the daemon (takes vLLM's engine flags)", add_help=False)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the daemon until a signal or a failure; the exit status."""
    # vLLM tells a lot while it starts; what matters comes from us. VLLM_LOGGING_LEVEL=INFO brings it back.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        from genserve.engine import vllm_flags
    except ModuleNotFoundError as error:
        print(f'genserve: {error}. Install the engine: pip install "genserve[cpu]" or "genserve[cuda]"', file=sys.stderr)
        return 1
    parser = vllm_flags.parser("genserve serve", DESCRIPTION)
    ServeConfig.add_flags(parser)
    flags = parser.parse_args(args.flags)
    try:
        config = ServeConfig.from_flags(vars(flags))
    except ValueError as error:
        parser.error(str(error))
    served_name = flags.model
    if flags.model is None:
        from genserve.engine.demo_model import DemoModelError, demo_model_path

        try:
            flags.model = str(demo_model_path())
        except DemoModelError as error:
            print(f"genserve: {error}", file=sys.stderr)
            return 1
        served_name = os.path.basename(flags.model)
    from genserve.daemon import serve

    return asyncio.run(serve(config, vllm_flags.engine_args(flags), served_name))
