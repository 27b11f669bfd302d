"""vLLM's own engine flags, unchanged, and the few defaults that differ where genserve runs."""

import argparse
import os

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

_CPU_KV_CACHE_BYTES = 4 << 30


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with every engine flag of vLLM. `--model` has no default."""
    parsed: argparse.ArgumentParser = FlexibleArgumentParser(prog=prog, description=description)
    AsyncEngineArgs.add_cli_args(parsed)  # type: ignore[arg-type]
    parsed.set_defaults(model=None)
    return parsed


def engine_args(flags: argparse.Namespace) -> AsyncEngineArgs:
    """The engine's arguments. `flags.model` must be set."""
    args = AsyncEngineArgs.from_cli_args(flags)
    if current_platform.is_cpu() and args.kv_cache_memory_bytes is None and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # vLLM takes nearly all memory of the machine, and a push needs some: the staged bytes and the prepared version.
        args.kv_cache_memory_bytes = _CPU_KV_CACHE_BYTES
    return args
