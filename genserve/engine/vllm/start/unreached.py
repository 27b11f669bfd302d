"""A row of the table of settings that are refused, and the rows of those that nothing can reach through this daemon.

Such a setting asks for what requests or answers would have to carry, or for a part of `vllm serve` that does not run
here. With some of them an engine starts, serves, and refuses every request; the others change nothing, in silence. Some
are for requests over HTTP, and are accepted with --openai-port.

This is data: `refusals` has the other rows, and reads all of them. The test test_refused_flags.py knows every flag of
vLLM's engine: a new one gets a row, or a line in engine_flags.txt that says that it reaches something.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Config = Any
"""A VllmConfig. Its fields are vLLM's: config/parallel.py, config/offload.py, config/speculative.py and so on."""
Flags = Any
"""vLLM's flags by their names, flat: a parsed namespace, AsyncEngineArgs, or `refusals.SetFlags`."""


@dataclass(frozen=True, slots=True)
class Row:
    """A setting. `name` never changes: documents and tests refer to it. `flags` are the flags that request it.
    `applies` says whether what the row `reads` has it: the flags before there is a configuration, the configuration,
    or both in turn, because other things than flags set it too. `reason` is a clause after "because". `instead` is
    the beginning of a sentence that says what to do. `problem` is what is wrong with the setting, by default that
    pushes and it exclude each other, or that it has a cost. A row that is not `refused` is a warning. `by_http`:
    requests over HTTP have no problem with it."""

    name: str
    flags: tuple[str, ...]
    applies: Callable[[Config | Flags], object]
    reason: str
    instead: str
    refused: bool = True
    problem: str = ""
    by_http: bool = False
    reads: Literal["flags", "configuration", "both"] = "configuration"

    @property
    def message(self) -> str:
        """One line for users."""
        about_pushes = "cannot be used with pushed weights" if self.refused else "has a cost when weights are pushed"
        problem = (self.problem or about_pushes) + (" without --openai-port" if self.by_http else "")
        return f"{' or '.join(self.flags)} {problem}, because {self.reason}; {self.instead} [{self.name}]"


@dataclass(frozen=True, slots=True)
class Unreached(Row):
    """A setting that nothing reaches; most are the user's flags and nothing else."""

    problem: str = "would reach nothing"
    reads: Literal["flags", "configuration", "both"] = "flags"


CONNECTORS_OF_REQUESTS: Final = frozenset(
    {
        "ExampleHiddenStatesConnector",
        "MooncakeConnector",
        "MoRIIOConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
    }
)
"""The connectors of keys and values that do nothing without kv_transfer_params in requests or answers."""


def connectors(config: Config) -> Sequence[str]:
    """Names of the connectors of keys and values: those in a MultiConnector, or the only one."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return ()
    if transfer.kv_connector != "MultiConnector":
        return (transfer.kv_connector,)
    extra = transfer.kv_connector_extra_config or {}
    return [str(each.get("kv_connector", "")) for each in extra.get("connectors", [])]


def _profiles_on_call(flags: Flags) -> bool:
    profiler = flags.profiler_config
    return profiler.profiler is not None and not profiler.capture_torch_profiler  # the latter is for CUDA graphs


UNREACHED: tuple[Row, ...] = (
    Unreached(
        name="pooling",
        flags=("--runner pooling",),
        applies=lambda config: config.model_config.runner_type == "pooling",
        reason="requests over gRPC are for tokens, and this model computes none",
        instead="pass --openai-port, whose server has /v1/embeddings, or serve the model with --runner generate",
        by_http=True,
        reads="configuration",
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
        instead="leave it out: requests with token ids and without text use no tokenizer",
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
    Unreached(
        name="kv-connector-of-requests",
        flags=("--kv-transfer-config",),
        applies=lambda config: any(name in CONNECTORS_OF_REQUESTS for name in connectors(config)),
        reason="requests or answers must carry what this connector transfers (kv_transfer_params), and those over gRPC "
        "have no field for it",
        instead="pass --openai-port, or use a connector that needs no field, such as OffloadingConnector",
        by_http=True,
        reads="configuration",
    ),
    Unreached(
        name="arguments-of-logits-processors",
        flags=("--logits-processors",),
        applies=lambda config: config.model_config.logits_processors,
        reason="requests over gRPC carry none (extra_args): a processor that waits for its own acts on no request",
        instead="pass --openai-port (vllm_xargs), or use processors that act on every request",
        refused=False,
        problem="get no arguments",
        by_http=True,
        reads="configuration",
    ),
)
