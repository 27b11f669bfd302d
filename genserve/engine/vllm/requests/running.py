"""The requests that an engine works on, from their admission until their streams end."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from genserve.engine.aborted import AbortedStream, Admission
from genserve.engine.generation import FinishReason, GenerationRequest, WeightSpan, prompt_too_long
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.requests.adapters import Adapters
from genserve.engine.vllm.requests.build import RequestBuilder, translated
from genserve.engine.vllm.requests.outputs import LeanOutputs
from genserve.engine.vllm.requests.prompts import PromptCodec
from genserve.engine.vllm.requests.stream import VllmStream
from genserve.errors import GenserveError, QueueFullError, RequestIdInUseError, WeightVersionMismatchError


class Tally(Protocol):
    """What all clients of the engine have admitted together."""

    @property
    def num_elsewhere(self) -> int:
        """Unfinished sequences of the other clients."""

    def publish(self, num_sequences: int, num_requests: int) -> None:
        """Reports to the other clients what this one has admitted and not finished."""

    def served(self, num_versions: int, num_tokens: int) -> None:
        """Counts tokens of a sequence that has ended: this many versions behind the served one."""


class RunningRequests:
    """Admits requests while there is room for their sequences. Holds each one's id, adapter and stream until it ends.

    `weight_version` returns the served version; `max_active`: sequences admitted and unfinished, by all clients, above
    which new ones are refused; `max_model_len`: in tokens.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        liveness: Liveness,
        prompts: PromptCodec,
        builder: RequestBuilder,
        adapters: Adapters,
        tally: Tally,
        weight_version: Callable[[], int],
        *,
        max_active: int,
        max_model_len: int,
    ) -> None:
        self._llm = llm
        self._liveness = liveness
        self._prompts = prompts
        self._builder = builder
        self._outputs = LeanOutputs(llm.output_processor, liveness)
        self._adapters = adapters
        self._tally = tally
        self._weight_version = weight_version
        self._max_active = max_active
        self._max_model_len = max_model_len
        self._streams: dict[str, VllmStream | Admission] = {}  # by id, from when the id is taken
        self._num_sequences: dict[str, int] = {}  # by request, from before it is admitted
        self._num_active = 0  # their sum
        self._reason_if_aborted = FinishReason.ABORTED
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def streams(self) -> list[VllmStream]:
        """Those of the admitted requests."""
        return [stream for stream in self._streams.values() if isinstance(stream, VllmStream)]

    async def submit(self, request: GenerationRequest) -> VllmStream | AbortedStream:
        """Admits a request, unless `abort` ends it meanwhile. Raises EngineDeadError, WeightVersionMismatchError,
        RequestIdInUseError, QueueFullError, and what is wrong with the request."""
        if self._liveness.dead:
            raise self._liveness.died()
        version = self._weight_version()
        if request.min_weight_version is not None and version < request.min_weight_version:
            raise WeightVersionMismatchError(
                f"version {version} is served, the request needs {request.min_weight_version}",
                metadata={"weight_version": str(version)},
            )
        if request.request_id in self._streams:
            raise RequestIdInUseError.of(request.request_id)
        self._builder.check_early(request)
        num_sequences = request.sampling.n or 1
        num_active = self._num_active + self._tally.num_elsewhere
        if num_active + num_sequences > self._max_active:
            raise QueueFullError(
                f"{num_active} sequences are running or waiting, of {self._max_active} at most",
                retry_after_s=1.0,
            )
        admission = self._streams[request.request_id] = Admission(request)  # the id is taken from here on
        self._num_sequences[request.request_id] = num_sequences
        self._num_active += num_sequences
        self._tally.publish(self._num_active, len(self._streams))
        self._idle.clear()
        try:
            admitting = admission.run(partial(self._admit, request))
            stream = await self._liveness.told(admitting, "the admission of a request")
        except BaseException:
            self._forget(request.request_id)
            raise
        if isinstance(stream, VllmStream):
            self._streams[request.request_id] = stream
        else:
            self._forget(request.request_id)
        return stream

    def pausing(self) -> int:
        """Requests that the engine aborts from now on end as PAUSED, also those that are admitted until `paused`. How
        many there are now."""
        self._reason_if_aborted = FinishReason.PAUSED
        streams = self.streams
        for stream in streams:
            stream.reason_if_aborted(FinishReason.PAUSED)
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

    async def _admit(self, request: GenerationRequest) -> VllmStream:
        ids = await self._prompts.encode(request.prompt)
        if len(ids) >= self._max_model_len:
            raise prompt_too_long(f"{len(ids)} tokens", len(ids), self._max_model_len)
        used = await self._adapters.use(request.lora_name, request.request_id) if request.lora_name else None
        lora = None if used is None else LoRARequest(used.unique_name, used.lora_id, used.directory)
        built = await self._builder.engine_request(request, ids, lora)
        unread = self._outputs.expect(request)
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
            self._outputs.forget(request.request_id)
        # internal: vLLM's own id of the request, which it made just now.
        internal_id = collector.request_id
        stream = VllmStream(
            request,
            internal_id,
            unread,
            self._abort_stream,
            self._forget,
            self._failure,
            self._count_served,
            lora_version=0 if used is None else used.version,
        )
        stream.reason_if_aborted(self._reason_if_aborted)
        return stream

    async def _abort_stream(self, stream: VllmStream) -> None:
        if not self._liveness.dead:
            await self._llm.abort(stream.internal_id, internal=True)

    def _count_served(self, spans: Sequence[WeightSpan]) -> None:
        version = self._weight_version()
        for span in spans:
            self._tally.served(version - span.version, span.end - span.start)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._num_active -= self._num_sequences.pop(request_id, 0)
        self._adapters.release(request_id)
        self._tally.publish(self._num_active, len(self._streams))
        if not self._streams:
            self._idle.set()

    def _failure(self, error: Exception) -> Exception:
        """What ended a stream that had begun."""
        if self._liveness.dead:
            return self._liveness.died()
        if isinstance(error, VLLMValidationError):  # from vLLM 0.33 on its engine checks some requests when they arrive
            return translated(error)
        return GenserveError(f"the engine failed: {type(error).__name__}: {error}")
