"""What the requests of an engine are admitted with: parts of it that do what a test wants."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

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


class Loras:
    """Of which each name is loaded."""

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
