"""vLLM's configuration: its own flags, unchanged, with a few other defaults."""

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, NoReturn

import vllm
from huggingface_hub.errors import LocalEntryNotFoundError
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
from vllm.logger import DEFAULT_LOGGING_CONFIG
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname

from genserve.engine.types import EngineInfo
from genserve.engine.vllm.start import failure as start_failure
from genserve.engine.vllm.start import refusals
from genserve.observe.log_lines import JsonFormatter, is_json
from genserve.settings.config import CPU_KV_CACHE_BYTES, FLAG_GROUP, MODEL_COMES_FIRST, ways
from genserve.worker.contract.lifetime import end_spawned_with_this_process
from genserve.worker.contract.vllm_settings import (
    EXTENSION,
    RANKS_HERE_KEY,
    RESERVING_WORKER,
    WEIGHT_UPDATE_KEY,
    runner_of,
)

_MAX_CPU_LORAS = 8
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_DRAFTS = "draft.*"
_JSON = {"()": f"{JsonFormatter.__module__}.{JsonFormatter.__name__}"}
"""vLLM's name for the parameters of a draft model; the one pattern that need not match a parameter."""


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser with every engine flag of vLLM. `--model` has no default."""
    parsed = _Parser(prog=prog, usage=f"{prog} [MODEL] [flags]", description=description)
    AsyncEngineArgs.add_cli_args(parsed)
    parsed.set_defaults(model=None)
    return parsed


class _Parser(FlexibleArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line, because the usage of hundreds of flags would hide it."""
        remedy = ""
        if message.startswith("unrecognized arguments: ") and " --" not in message:
            remedy = f"; {MODEL_COMES_FIRST}"
        print(f"{self.prog}: error: {message}{remedy}", file=sys.stderr)
        raise SystemExit(2)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """The flags that a shortened one may mean: never one of the daemon's, also in the file that --config names."""
        # internal: argparse's. Each tuple begins with the action of a flag, whose container is its group.
        found: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in found if each[0].container.title != FLAG_GROUP]

    def format_help(self) -> str:
        """vLLM's help. It lists the groups if --help=WORD is in none of them."""
        text: str = super().format_help()
        if self._search_keyword is None or not text.lstrip().startswith("No group"):
            return text
        groups = ", ".join(group.title for group in self._action_groups if group.title and group._group_actions)
        return f"{text}\nGroups: {groups}\n"


def check_flags(flags: argparse.Namespace, weight_update: str, *, with_openai: bool) -> None:
    """Raises ValueError or EngineStartError for flags that are refused whatever the model is. Looks for no model.
    `with_openai`: requests come over HTTP, too."""
    if weight_update not in ("auto", *ways(current_platform.device_type)):
        raise ValueError(f"--weight-update {weight_update} needs a GPU: on a CPU beside uses the host's memory")
    refusals.check_flags(flags, with_openai=with_openai)


def engine_args(flags: argparse.Namespace) -> AsyncEngineArgs:
    """The engine's arguments. `flags.model` must be set. Raises EngineStartError."""
    try:
        with start_failure.configuring(flags.model):
            args = AsyncEngineArgs.from_cli_args(flags)
    except start_failure.EngineStartError:
        raise
    except LocalEntryNotFoundError as error:  # without a network vLLM looks for both here
        raise start_failure.EngineConfigError(_not_in_cache(flags)) from error
    except Exception as error:
        raise start_failure.EngineStartError(
            start_failure.naming(flags.model, start_failure.in_one_line(error))
        ) from error
    if current_platform.is_cpu() and args.kv_cache_memory_bytes is None and "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        # vLLM uses nearly all memory of the machine, and a push needs some: the staged bytes and the prepared version.
        args.kv_cache_memory_bytes = CPU_KV_CACHE_BYTES
    return args


def _not_in_cache(flags: argparse.Namespace) -> str:
    asked = [f"--model {flags.model}", *([f"--tokenizer {flags.tokenizer}"] if flags.tokenizer is not None else [])]
    switch = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
    return (
        f"{' or '.join(asked)} is not in the Hugging Face cache, and the network is off ({switch}): unset it, or name "
        "a directory"
    )


def adapted(args: AsyncEngineArgs, weight_update: str) -> AsyncEngineArgs:
    """Adds to the arguments what genserve needs: its code in the workers, which end with this process and take new
    versions as `weight_update` says, its own statistics, and no compiled code on the CPU. Raises ValueError."""
    args.additional_config = {**args.additional_config, WEIGHT_UPDATE_KEY: weight_update}
    if args.worker_cls == "auto" and current_platform.is_cuda_alike():
        args.worker_cls = RESERVING_WORKER
    args.worker_extension_cls = _extension(args.worker_extension_cls)
    end_spawned_with_this_process()
    # The daemon serves its port while the engine starts: a process that is forked from it would have the locks of
    # gRPC's threads without the threads. `vllm serve` has this default too.
    if os.environ.setdefault(_START_METHOD, "spawn") != "spawn":
        raise ValueError(f"{_START_METHOD}: no process can be forked from the daemon, which has threads: unset it")
    args.use_tqdm_on_load = False
    if args.enable_lora and args.max_cpu_loras is None:
        # vLLM's default is the number of adapters in one step. A new adapter is held beside the one that it replaces.
        args.max_cpu_loras = max(_MAX_CPU_LORAS, args.max_loras)
    if args.structured_outputs_config.backend == "auto":
        # "auto" checks each constraint with the first backend that takes it, and compiles all of them with the one that
        # the first request came to: one request would decide what the others can say, and how long that takes.
        args.structured_outputs_config.backend = "xgrammar"
    if args.enable_sleep_mode and _DRAFTS not in args.sleep_preserve_parameter_names:
        # A sleep of level 2 drops the weights of a draft model too, and pushes do not contain those.
        args.sleep_preserve_parameter_names = [*args.sleep_preserve_parameter_names, _DRAFTS]
    args.disable_log_stats = True  # vLLM's default loggers; genserve's is added to the engine
    if current_platform.is_cpu():
        # Packed linear layers are closures on the CPU: compiled code would keep the old ones.
        args.enforce_eager = True
        if args.enable_chunked_prefill is None:
            # vLLM 0.32 kills its engine when a request with a seed is prefilled in pieces on the CPU ("CPU Generator
            # does not use offset"), and a push that recomputes keys and values prefills many requests at once.
            args.enable_chunked_prefill = False
        # What is left to compile are helpers (ranks of logprobs): they would stop the first request for 5-15 s, to
        # run a C++ compiler that the machine may not have.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return args


def with_ranks_here(args: AsyncEngineArgs, config: VllmConfig) -> VllmConfig:
    """The configuration made from the arguments. Both then tell workers how many of them share this host's memory.
    Processes of the engine cannot count this, because vLLM turns each replica of a dense model into a separate
    engine."""
    parallel = config.parallel_config
    ranks_here = {RANKS_HERE_KEY: parallel.local_world_size * parallel.data_parallel_size_local}
    args.additional_config = {**args.additional_config, **ranks_here}
    config.additional_config = args.additional_config
    return config


def start_explained(
    args: AsyncEngineArgs, report: start_failure.Report, progress_path: str = ""
) -> AbstractContextManager[None]:
    """A context in which to start the engine: a failure becomes an EngineStartError. A user's own logging configuration
    is not changed; then a failure keeps vLLM's text, and `report` and `progress_path`, where a Progress listens, get
    nothing."""
    wanted = args.create_logging_config()
    if wanted.pylogging_config_file is not None or not wanted.configure_logging or wanted.formatter != "text":
        return nullcontext()

    def use(path: str) -> None:
        args.log_config_file = path

    level = {"level": wanted.log_level}
    default = DEFAULT_LOGGING_CONFIG
    config = {
        **default,
        "formatters": {
            name: _JSON if is_json() else {**each, "log_level": wanted.log_level}
            for name, each in default["formatters"].items()
        },
        "handlers": {name: {**each, **level} for name, each in default["handlers"].items()},
        "loggers": {name: {**each, **level} for name, each in default["loggers"].items()},
    }
    return start_failure.explained(config, use, args.model, report, progress_path)


def _extension(asked: str) -> str:
    """The class to mix into workers. Raises ValueError for a user's class that does not derive from genserve's."""
    if not asked:
        return EXTENSION
    lineage = [f"{each.__module__}.{each.__qualname__}" for each in resolve_obj_by_qualname(asked).__mro__]
    if EXTENSION not in lineage:
        raise ValueError(f"--worker-extension-cls {asked} must derive from {EXTENSION}: pushes are applied through it")
    return asked


def info(config: VllmConfig, max_n: int) -> EngineInfo:
    """What an engine with this configuration serves. `max_n`: sequences of one request that the daemon allows."""
    model, parallel = config.model_config, config.parallel_config
    return EngineInfo(
        model=model.model,
        architecture=model.architecture,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=model.get_vocab_size(),
        device=current_platform.device_type,
        max_model_len=model.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_logprobs=model.get_vocab_size() if model.max_logprobs == -1 else model.max_logprobs,
        # More sequences than vLLM's own queue takes would always be refused.
        max_n=min(max_n, config.scheduler_config.max_num_queued_reqs or max_n),
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        max_loras=(config.lora_config.max_cpu_loras or 0) if config.lora_config is not None else 0,
        max_lora_rank=config.lora_config.max_lora_rank if config.lora_config is not None else 0,
        versions={"vllm": vllm.__version__, "torch": installed_version("torch")},
        logprobs_mode=model.logprobs_mode,
        can_sleep=current_platform.is_cpu() or model.enable_sleep_mode,
        model_runner=runner_of(config),
        weight_transfer=config.weight_transfer_config.backend if config.weight_transfer_config is not None else "",
    )


def checkpoint_directory(config: VllmConfig) -> Path | None:
    """Where the checkpoint's files lie, if they lie on this host."""
    name = config.model_config.model
    if os.path.isdir(name):
        return Path(name)
    from huggingface_hub import snapshot_download

    revision, cache = config.model_config.revision, config.load_config.download_dir
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):
        return None
