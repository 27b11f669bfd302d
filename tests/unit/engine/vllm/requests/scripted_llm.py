"""What the requests of an engine are admitted with: parts of it that do what a test wants."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.output_processor import RequestOutputCollector

from genserve.engine.generation import GenerationRequest
from genserve.engine.types import UsedAdapter
from genserve.engine.vllm.requests.outputs import StreamedOutputs
from tests.support.scripted_engine import Gate

CONFIG = SimpleNamespace(
    use_v2_model_runner=True,
    device_config=SimpleNamespace(device_type="cpu"),
    lora_config=None,
    scheduler_config=SimpleNamespace(enable_chunked_prefill=False, long_prefill_token_threshold=0),
    watermark_config=None,
    model_config=SimpleNamespace(get_vocab_size=lambda: 512),
)
"""vLLM's configuration, as much of it as is looked at."""
UNTRACED = SimpleNamespace(otlp_traces_endpoint=None)


class Tokenizer:
    """Of one word, for prompts that are tokens."""

    def get_vocab(self) -> dict[str, int]:
        """As Hugging Face's."""
        return {"a": 0}

    def apply_chat_template(self, conversation: object) -> str:
        """As Hugging Face's."""
        return ""


class Collector:
    """vLLM's queue of a request's outputs, which knows vLLM's id of the request."""

    def __init__(self, request_id: str) -> None:
        self.request_id = f"{request_id}-internal"


class ScriptedLlm:
    """As AsyncLLM: `taking` and `ending` hold its answers up, `refusal` is raised instead of an answer. `aborted` says
    which ids it was asked to end, and whether they are its own."""

    vllm_config, observability_config = CONFIG, UNTRACED

    def __init__(self) -> None:
        self.taking: Gate | None = None
        self.ending: Gate | None = None
        self.refusal: BaseException | None = None
        self.aborted: list[tuple[str, bool]] = []
        self.output_processor = SimpleNamespace(streams={})

    def get_tokenizer(self) -> Tokenizer:
        """As vLLM's."""
        return Tokenizer()

    async def add_request(self, request_id: str, prepared: Any, params: Any) -> Collector:
        """As vLLM's."""
        if self.taking is not None:
            self.taking.reached.set()
            await self.taking.open.wait()
        if self.refusal is not None:
            raise self.refusal
        return Collector(request_id)

    async def abort(self, request_id: str, internal: bool = False) -> None:
        """As vLLM's."""
        if self.ending is not None:
            self.ending.reached.set()
            await self.ending.open.wait()
        self.aborted.append((request_id, internal))


class ProcessingLlm(ScriptedLlm):
    """Processes outputs as AsyncLLM does."""

    def __init__(self) -> None:
        super().__init__()
        self.output_processor: Any = StreamedOutputs(None, log_stats=False)

    async def add_request(self, request_id: str, prepared: Any, params: Any) -> Any:
        """As vLLM's."""
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False)
        core = EngineCoreRequest(
            f"{request_id}-internal", [1, 1], None, params, None, 0.0, None, None, None, external_req_id=request_id
        )
        collector = RequestOutputCollector(params.output_kind, core.request_id)
        self.output_processor.add_request(core, None, None, 0, collector)
        return collector

    def step(self, request_id: str, num_tokens: int, version: int, finish: VllmFinishReason | None = None) -> None:
        """The engine has sampled so many tokens under a version."""
        output = EngineCoreOutput(f"{request_id}-internal", [7] * num_tokens, finish_reason=finish)
        self.output_processor.process_outputs([output], 0.0, None, weight_version=str(version))


class Loras:
    """Every name is loaded."""

    async def use(self, name: str, request_id: str) -> UsedAdapter:
        """The same for all."""
        return UsedAdapter(f"{name} 1", 1, "/nowhere", 3)

    def release(self, request_id: str) -> None:
        """Nothing was used."""


class Builder:
    """Builds what nobody looks at."""

    async def engine_request(self, request: GenerationRequest, ids: list[int], lora: object) -> Any:
        """For ScriptedLlm."""
        return SimpleNamespace(params=None)


@dataclass
class ScriptedTally:
    """Of another client that has admitted `num_elsewhere` sequences. `told` is what it was told."""

    num_elsewhere: int = 0
    told: tuple[int, int] = (0, 0)
    served_tokens: list[tuple[int, int]] = field(default_factory=list)

    def publish(self, num_sequences: int, num_requests: int) -> None:
        """Notes it."""
        self.told = num_sequences, num_requests

    def served(self, num_versions: int, num_tokens: int) -> None:
        """Notes it."""
        self.served_tokens.append((num_versions, num_tokens))
