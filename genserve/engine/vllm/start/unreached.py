"""The settings of vLLM that nothing can reach through this daemon, and what to use instead.

They ask for what requests or answers would have to carry, or for a part of `vllm serve` that does not run here. With
some of them an engine starts, serves, and refuses every request; the others change nothing, in silence. So they are
refused at the start, as `refusals` refuses what pushes cannot work with. Some are for requests over HTTP, and are taken
with --openai-port.

tests/unit/engine/vllm/start/test_unreached.py knows every flag of vLLM's engine: a new one has a row here, or a line
there that says that it reaches something.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from genserve.engine.vllm.start.failure import EngineStartError

Config = Any
"""A VllmConfig."""
Flags = Any
"""vLLM's flags, parsed."""


@dataclass(frozen=True, slots=True)
class Unreached:
    """A setting. `name`, `flags`, `applies`, `reason`, `instead` and `by_flags` are as in `refusals.Row`. `by_http`:
    requests over HTTP reach it."""

    name: str
    flags: tuple[str, ...]
    applies: Callable[[Config | Flags], object]
    reason: str
    instead: str
    by_http: bool = False
    by_flags: bool = True

    @property
    def message(self) -> str:
        """One line for users."""
        without = " without --openai-port" if self.by_http else ""
        return f"{' or '.join(self.flags)} would reach nothing{without}: {self.reason}; {self.instead} [{self.name}]"


def check_flags(flags: Flags, *, with_openai: bool) -> None:
    """Raises EngineStartError naming the flags that nothing reaches whatever the model is."""
    _refuse([row for row in TABLE if row.by_flags and row.applies(flags)], with_openai=with_openai)


def check(config: Config, *, with_openai: bool) -> None:
    """Raises EngineStartError naming the flags that nothing reaches with this model."""
    _refuse([row for row in TABLE if not row.by_flags and row.applies(config)], with_openai=with_openai)


def _refuse(found: Sequence[Unreached], *, with_openai: bool) -> None:
    refused = [row.message for row in found if not (row.by_http and with_openai)]
    if refused:
        raise EngineStartError("; ".join(refused))


def _profiles_on_call(flags: Flags) -> bool:
    profiler = flags.profiler_config
    return profiler.profiler is not None and not profiler.capture_torch_profiler  # the latter is for CUDA graphs


TABLE: tuple[Unreached, ...] = (
    Unreached(
        name="pooling",
        flags=("--runner pooling",),
        applies=lambda config: config.model_config.runner_type == "pooling",
        reason="requests over gRPC are for tokens, and this model computes none",
        instead="pass --openai-port, whose server has /v1/embeddings, or serve the model with --runner generate",
        by_http=True,
        by_flags=False,
    ),
    Unreached(
        name="io-processors",
        flags=("--io-processor-plugin",),
        applies=lambda flags: flags.io_processor_plugin,
        reason="the plugin makes requests for pooling models",
        instead="pass --openai-port, or leave it out",
        by_http=True,
    ),
    Unreached(
        name="prompt-embeddings",
        flags=("--enable-prompt-embeds",),
        applies=lambda flags: flags.enable_prompt_embeds,
        reason="prompts over gRPC are text, chats or token ids",
        instead="pass --openai-port, or send token ids",
        by_http=True,
    ),
    Unreached(
        name="media-of-requests",
        flags=(
            "--allowed-local-media-path",
            "--allowed-media-domains",
            "--media-io-kwargs",
            "--interleave-mm-strings",
            "--enable-mm-embeds",
        ),
        applies=lambda flags: (
            flags.allowed_local_media_path
            or flags.allowed_media_domains
            or flags.media_io_kwargs
            or flags.interleave_mm_strings
            or flags.enable_mm_embeds
        ),
        reason="prompts over gRPC have no images, video or audio",
        instead="pass --openai-port, or leave it out",
        by_http=True,
    ),
    Unreached(
        name="default-sampling",
        flags=("--override-generation-config",),
        applies=lambda flags: flags.override_generation_config,
        reason="a field that a request over gRPC leaves out has vLLM's default, whatever the model's files say",
        instead="set the fields of requests, or pass --openai-port; --generation-config decides which EOS tokens there "
        "are",
        by_http=True,
    ),
    Unreached(
        name="drafts-of-requests",
        flags=("--per-request-spec-decode-metrics",),
        applies=lambda flags: flags.per_request_spec_decode_metrics != "none",
        reason="answers over gRPC have no field for it",
        instead="use --metrics-port, whose vllm:spec_decode_* count all requests, or pass --openai-port",
        by_http=True,
    ),
    Unreached(
        name="renderer-threads",
        flags=("--renderer-num-workers",),
        applies=lambda flags: flags.renderer_num_workers != 1,
        reason="the daemon renders chats and tokenises texts itself",
        instead="use --frontends, or pass --openai-port",
        by_http=True,
    ),
    Unreached(
        name="routed-experts",
        flags=("--enable-return-routed-experts", "--aux-output-config"),
        applies=lambda flags: (
            flags.enable_return_routed_experts or flags.aux_output_config.enable_return_routed_experts
        ),
        reason="answers have no field for the experts of a token",
        instead="leave it out",
    ),
    Unreached(
        name="sampling-masks",
        flags=("--return-sampling-mask",),
        applies=lambda flags: flags.return_sampling_mask,
        reason="answers have no field for the tokens that sampling has left",
        instead="leave it out",
    ),
    Unreached(
        name="adapters-of-modalities",
        flags=("--default-mm-loras",),
        applies=lambda flags: flags.default_mm_loras,
        reason="adapters are pushed, and a request names the one that it uses",
        instead="push adapters (push_lora, genserve lora)",
    ),
    Unreached(
        name="no-tokenizer",
        flags=("--skip-tokenizer-init",),
        applies=lambda flags: flags.skip_tokenizer_init,
        reason="any request may ask for text, stop strings or bad words, which need a tokenizer",
        instead="leave it out: requests with token ids and without text cost no tokeniser",
    ),
    Unreached(
        name="profiler",
        flags=("--profiler-config",),
        applies=_profiles_on_call,
        reason="no call starts or stops vLLM's profiler",
        instead="use vLLM's spans (--otlp-traces-endpoint), Nsight with --enable-layerwise-nvtx-tracing, or py-spy",
    ),
    Unreached(
        name="log-of-statistics",
        flags=("--aggregate-engine-logging",),
        applies=lambda flags: flags.aggregate_engine_logging,
        reason="the daemon's engines log no statistics",
        instead="use --metrics-port",
    ),
    Unreached(
        name="servers-of-engines",
        flags=("--data-parallel-multi-port-external-lb",),
        applies=lambda flags: flags.data_parallel_multi_port_external_lb,
        reason="it makes `vllm serve` start a server for each engine",
        instead="start a daemon for each (genserve up)",
    ),
)
"""The order of the messages."""
