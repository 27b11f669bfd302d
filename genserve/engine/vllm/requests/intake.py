"""Requests of one client of the engine, from the prompt to the stream. The daemon has one, and each front end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.v1.engine.async_llm import AsyncLLM

from genserve.engine.generation import ChatPrompt, GenerationRequest, TextPrompt
from genserve.engine.protocol import GenerationStream
from genserve.engine.types import EngineInfo
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.requests.adapters import Adapters
from genserve.engine.vllm.requests.build import RequestBuilder
from genserve.engine.vllm.requests.prompts import PromptCodec
from genserve.engine.vllm.requests.running import RunningRequests, Tally


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """`max_active_requests`: sequences admitted and unfinished, above which new ones are refused; `max_n`: of one
    request; `trust_request_chat_template`: requests may bring one along."""

    max_active_requests: int
    max_n: int
    trust_request_chat_template: bool = False


class Intake:
    """Admits requests, and converts text. `weight_version` returns the served version."""

    def __init__(
        self,
        llm: AsyncLLM,
        liveness: Liveness,
        info: EngineInfo,
        limits: IntakeLimits,
        adapters: Adapters,
        tally: Tally,
        weight_version: Callable[[], int],
    ) -> None:
        self._prompts = PromptCodec(
            llm.get_tokenizer(),
            info.max_model_len,
            info.max_request_bytes,
            vocab_size=info.vocab_size,
            trust_templates=limits.trust_request_chat_template,
        )
        self._builder = RequestBuilder(llm, info)
        self.running = RunningRequests(
            llm,
            liveness,
            self._prompts,
            self._builder,
            adapters,
            tally,
            weight_version,
            max_active=limits.max_active_requests,
            max_model_len=info.max_model_len,
        )

    @property
    def is_traced(self) -> bool:
        """Whether vLLM exports spans."""
        return self._builder.is_traced

    async def submit(self, request: GenerationRequest) -> GenerationStream:
        """Admits a request."""
        return await self.running.submit(request)

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt."""
        return await self._prompts.encode(prompt, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return await self._prompts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def close(self) -> None:
        """Ends the threads."""
        self._prompts.close()
        self._builder.close()
