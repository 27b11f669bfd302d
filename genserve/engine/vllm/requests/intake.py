"""The requests of one client of the engine, from their admission until their streams end. The daemon has one intake,
and each front end."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest

from genserve.engine.aborted import AbortedStream, Admission
from genserve.engine.generation import FinishReason, GenerationRequest, TokenPrompt, WeightSpan, prompt_too_long
from genserve.engine.types import EngineInfo, UsedAdapter
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.requests.build import RequestBuilder, translated
from genserve.engine.vllm.requests.outputs import StreamingLLM
from genserve.engine.vllm.requests.prompts import PromptCodec
from genserve.engine.vllm.requests.refusals import MAX_CACHE_SALT
from genserve.engine.vllm.requests.stream import VllmStream
from genserve.errors import (
    GenserveError,
    InvalidFieldError,
    QueueFullError,
    RequestIdInUseError,
    WeightVersionMismatchError,
)


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """`max_active_requests`: sequences admitted and unfinished, above which new ones are refused; `max_n`: of one
    request; `trust_request_chat_template`: requests may bring one along."""

    max_active_requests: int
    max_n: int
    trust_request_chat_template: bool = False


class Adapters(Protocol):
    """The LoRA adapters that requests use: those of the daemon, or of a daemon that a front end asks. Each stays loaded
    for as long as a request uses it."""

    async def use(self, name: str, request_id: str, /) -> UsedAdapter:
        """The adapter of a request, until `release`. Raises LoraNotFoundError."""

    def release(self, request_id: str, /) -> None:
        """Records that the request has ended, or was not admitted. Does nothing for one without an adapter."""


class Tally(Protocol):
    """What all clients of the engine have admitted together."""

    @property
    def num_elsewhere(self) -> int:
        """Unfinished sequences of the other clients."""

    def publish(self, num_sequences: int, num_requests: int) -> None:
        """Reports to the other clients what this one has admitted and not finished."""

    def served(self, num_versions: int, num_tokens: int) -> None:
        """Counts tokens of a sequence that has ended: this many versions behind the served one."""


class Intake:
    """Admits requests while there is room for their sequences. Holds each one's id, adapter and stream until it ends.
    `weight_version` returns the served version."""

    def __init__(
        self,
        llm: StreamingLLM,
        liveness: Liveness,
        info: EngineInfo,
        limits: IntakeLimits,
        adapters: Adapters,
        tally: Tally,
        weight_version: Callable[[], int],
    ) -> None:
        self._llm = llm
        self._liveness = liveness
        self._info = info
        self._max_active = limits.max_active_requests
        self.adapters = adapters
        self._tally = tally
        self._weight_version = weight_version
        self.prompts = PromptCodec(
            llm.get_tokenizer(),
            info.max_model_len,
            info.max_request_bytes,
            vocab_size=info.vocab_size,
            trust_templates=limits.trust_request_chat_template,
        )
        """Converts text."""
        self.builder = RequestBuilder(llm, info)
        self.is_traced = self.builder.is_traced
        """Whether vLLM exports spans."""
        self._adding = llm.output_processor.streams
        self._streams: dict[str, VllmStream | Admission] = {}  # by id, from when the id is taken
        self._num_sequences: dict[str, int] = {}  # by request, from before it is admitted
        self._num_active = 0  # their sum
        self._reason_if_aborted = FinishReason.ABORTED
        self._idle = asyncio.Event()
        self._idle.set()

    async def submit(self, request: GenerationRequest) -> VllmStream | AbortedStream:
        """Admits a request, unless `abort` ends it meanwhile. Raises EngineDeadError, WeightVersionMismatchError,
        RequestIdInUseError, QueueFullError, and what is wrong with the request."""
        self._check(request)
        request_id, num_sequences = request.request_id, request.sampling.n or 1
        admission = self._streams[request_id] = Admission(request)  # the id is taken from here on
        self._num_sequences[request_id] = num_sequences
        self._num_active += num_sequences
        self._tally.publish(self._num_active, len(self._streams))
        self._idle.clear()
        try:
            stream = await admission.run(partial(self._admit, request))
        except BaseException as error:
            self.forget(request_id)
            if isinstance(error, Exception):
                await self._liveness.raise_if_dead(error, "the admission of a request")
            raise
        if isinstance(stream, VllmStream):
            self._streams[request_id] = stream
        else:
            self.forget(request_id)
        return stream

    def pausing(self) -> int:
        """Requests that the engine aborts from now on end as PAUSED, also those that are admitted until `paused`. How
        many there are now. One that is about to end for another reason keeps it, and is not among them."""
        self._reason_if_aborted = FinishReason.PAUSED
        streams = [s for s in self._streams.values() if isinstance(s, VllmStream) and not s.is_ending]
        for stream in streams:
            stream.reason_if_aborted = FinishReason.PAUSED
        return len(streams)

    def paused(self) -> None:
        """Call when the pause has aborted its requests."""
        self._reason_if_aborted = FinishReason.ABORTED

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
        await self._idle.wait()

    def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """Ends these requests, or all, with reason ABORTED, also those that are being admitted; the ids that were
        running, and those that were not."""
        wanted = list(self._streams) if request_ids is None else list(request_ids)
        running = {i: self._streams[i] for i in wanted if i in self._streams}
        for stream in running.values():
            stream.abort()
        return list(running), [i for i in wanted if i not in running]

    def close(self) -> None:
        """Ends the threads."""
        self.prompts.close()
        self.builder.close()

    def _check(self, request: GenerationRequest) -> None:
        """All that can be wrong before the prompt is tokenised."""
        if self._liveness.dead:
            raise self._liveness.died()
        if request.min_weight_version is not None:
            version = self._weight_version()
            if version < request.min_weight_version:
                raise WeightVersionMismatchError(
                    f"version {version} is served, the request needs {request.min_weight_version}",
                    metadata={"weight_version": str(version)},
                )
        if request.request_id in self._streams:
            raise RequestIdInUseError.of(request.request_id)
        num_sequences, max_n = request.sampling.n or 1, self._info.max_n
        if num_sequences > max_n:
            raise InvalidFieldError.of("sampling.n", f"must be at most {max_n} (--max-n), is {num_sequences}")
        if len(request.cache_salt) > MAX_CACHE_SALT:
            raise InvalidFieldError.of("cache.salt", f"must be at most {MAX_CACHE_SALT} characters long")
        num_active = self._num_active + self._tally.num_elsewhere
        if num_active + num_sequences > self._max_active:
            raise QueueFullError(
                f"{num_active} sequences are running or waiting, of {self._max_active} at most",
                retry_after_s=1.0,
            )

    async def _admit(self, request: GenerationRequest) -> VllmStream:
        prompt, max_model_len = request.prompt, self._info.max_model_len
        ids = list(prompt.ids) if isinstance(prompt, TokenPrompt) else await self.prompts.encode(prompt)
        if len(ids) >= max_model_len:
            raise prompt_too_long(f"{len(ids)} tokens", len(ids), max_model_len)
        if isinstance(prompt, TokenPrompt):  # vLLM would not say which field
            self.prompts.check_vocabulary(ids)
        used = await self.adapters.use(request.lora_name, request.request_id) if request.lora_name else None
        lora = None if used is None else LoRARequest(used.unique_name, used.lora_id, used.directory)
        built = await self.builder.engine_request(request, ids, lora)
        stream = VllmStream(request, self, lora_version=0 if used is None else used.version)
        self._adding[request.request_id] = stream
        try:
            # internal: vLLM takes what its input processor made, and calls it deprecated. Only so is it known what is
            # sent, and are constraints compiled beside the event loop.
            collector = await self._llm.add_request(request.request_id, built, built.params)
        except BaseException as error:
            if not self._liveness.dead:
                await asyncio.shield(self._llm.abort(request.request_id))
            if isinstance(error, Exception):
                raise translated(error) from error
            raise
        finally:
            del self._adding[request.request_id]
        # internal: vLLM's own id of the request, which it made just now.
        stream.admitted(collector.request_id, self._reason_if_aborted)
        return stream

    # What a stream asks of its intake:

    @property
    def is_dead(self) -> bool:
        """Whether the cause of the engine's death is known."""
        return self._liveness.dead

    async def end(self, stream: VllmStream) -> None:
        """Ends a request in vLLM."""
        if not self._liveness.dead:
            await self._llm.abort(stream.internal_id, internal=True)

    def forget(self, request_id: str) -> None:
        """A request has ended, or was not admitted."""
        self._streams.pop(request_id, None)
        self._num_active -= self._num_sequences.pop(request_id, 0)
        self.adapters.release(request_id)
        self._tally.publish(self._num_active, len(self._streams))
        if not self._streams:
            self._idle.set()

    def failure(self, error: Exception) -> Exception:
        """The error for a client, of what ended a stream that had begun."""
        if self._liveness.dead:
            return self._liveness.died()
        if isinstance(error, VLLMValidationError):  # from vLLM 0.33 on its engine checks some requests when they arrive
            return translated(error)
        return GenserveError(f"the engine failed: {type(error).__name__}: {error}")

    def count_served(self, spans: Sequence[WeightSpan]) -> None:
        """Counts the tokens of a sequence that has ended, by how far they are behind the served version."""
        version = self._weight_version()
        for span in spans:
            self._tally.served(version - span.version, span.end - span.start)
