"""What the requests of an engine are admitted with: parts of it that do what a test wants."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as VllmFinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from genserve.engine.generation import AnyPrompt, GenerationRequest, TokenPrompt
from genserve.engine.types import UsedAdapter
from tests.support.scripted_engine import Gate


class Collector:
    """vLLM's queue of a request's outputs, which knows vLLM's id of the request."""

    def __init__(self, request_id: str) -> None:
        self.request_id = f"{request_id}-internal"


class ScriptedLlm:
    """As AsyncLLM: `taking` and `ending` hold its answers up, `refusal` is raised instead of an answer. `aborted` says
    which ids it was asked to end, and whether they are its own."""

    def __init__(self) -> None:
        self.taking: Gate | None = None
        self.ending: Gate | None = None
        self.refusal: BaseException | None = None
        self.aborted: list[tuple[str, bool]] = []
        self.output_processor = SimpleNamespace(request_states={}, add_request=None)

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
        self.output_processor: Any = OutputProcessor(None, log_stats=False)

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


class Codec:
    """Of prompts that are tokens."""

    async def encode(self, prompt: AnyPrompt) -> list[int]:
        """As they are."""
        assert isinstance(prompt, TokenPrompt)
        return list(prompt.ids)


class Builder:
    """Builds what nobody looks at."""

    def check_early(self, request: GenerationRequest) -> None:
        """Nothing is wrong."""

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
