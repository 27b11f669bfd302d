"""Writes down what clients do: each call becomes an Operation, each generation a Stream."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from genserve.client import AsyncClient, EngineState, PushResult, ServedWeights, WeightSpan
from genserve.client import Delta as ClientDelta
from genserve.client.weights.download import PulledWeights
from genserve.errors import GenserveError
from tests.faults.contents import Contents
from tests.faults.history import AppliedAnswer, Delta, History, Operation, Outcome, Span, Stream

# These leave open whether the daemon has done, or will do, what it was asked. DEADLINE_EXCEEDED is among them because
# it may be the client's own, INTERNAL because it may come after the weights were put in place.
_OPEN_REASONS = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "ENGINE_DEAD", "DRAINING", "INTERNAL", "BROKEN"})
_VERSION_REASONS = frozenset({"VERSION_NOT_NEWER", "WEIGHT_VERSION_MISMATCH"})

T = TypeVar("T")


class AnswerLost(Exception):
    """A call has been made, and nobody knows what came of it."""


class Recorder:
    """Records one life of a daemon into a history."""

    def __init__(self, history: History, life: int, contents: Contents) -> None:
        self.history = history
        self.contents = contents
        self.life = life

    async def call(self, call: Awaitable[T], kind: str, client: str, **fields: Any) -> T | None:
        """What a call answers, or None when it is refused or its answer is lost; further `fields` as in Operation."""
        operation = Operation(kind, client, self.life, time.monotonic(), **fields)
        self.history.operations.append(operation)
        try:
            result = await call
        except GenserveError as error:
            operation.responded_s, operation.reason = time.monotonic(), _reason(error)
            if operation.reason not in _OPEN_REASONS and "loaded_by" not in error.metadata:
                operation.outcome = Outcome.REFUSED
            if error.reason in _VERSION_REASONS:
                operation.served = int(error.metadata["weight_version"])
            return None
        except AnswerLost:
            return None
        operation.responded_s, operation.outcome = time.monotonic(), Outcome.OK
        self._note(operation, result)
        return result

    def _note(self, operation: Operation, result: object) -> None:
        """What the answer says of the engine and of what was applied."""
        state = getattr(result, "state", None)
        if isinstance(state, EngineState):
            operation.served, operation.phase = state.weight_version, state.phase
        if isinstance(result, ServedWeights | PulledWeights):
            operation.served = result.weight_version
        if isinstance(result, PulledWeights):
            operation.content = self.contents.name_of({n: bytes(t.data) for n, t in result.tensors.items()})
        if isinstance(result, PushResult) and result.applied is not None:
            applied = result.applied
            operation.applied = AppliedAnswer(applied.previous_version, applied.active_version, repr(applied))
        lease = getattr(result, "lease", None)
        if lease is not None:
            operation.lease_id = lease.lease_id

    async def generate(
        self,
        tokens_of: AsyncClient,
        client: str,
        prompt: Sequence[int],
        *,
        link: str,
        interval: int = 1,
        pace: Callable[[], Awaitable[None]] | None = None,
        **options: Any,
    ) -> Stream:
        """Reads one generation; `interval` is the number of tokens in a message, `pace`, awaited after each, makes the
        reader slow. Greedy, so that its tokens can be checked. A stream that ends with an error keeps what it has."""
        immediate = interval == 1 and pace is None
        stream = Stream(client, self.life, time.monotonic(), link, list(prompt), immediate)
        stream.lora_name = options.get("lora_name") or ""
        self.history.streams.append(stream)
        async with tokens_of.stream(prompt, temperature=0.0, stream_interval=interval, **options) as deltas:
            try:
                async for delta in deltas:
                    _add(stream, delta, time.monotonic())
                    if pace is not None:
                        await pace()
            except GenserveError as error:
                stream.error, stream.error_s = _reason(error), time.monotonic()
        return stream


def _add(stream: Stream, delta: ClientDelta, at_s: float) -> None:
    for output in delta.outputs:
        if output.token_ids:
            stream.tokens += output.token_ids
            stream.deltas.append(Delta(at_s, len(output.token_ids), _spans(output.weight_spans)))
        if output.finish is not None:
            stream.finish, stream.final_spans = output.finish.reason, _spans(output.finish.weight_spans)


def _reason(error: GenserveError) -> str:
    """The daemon's reason; BROKEN for a code without one, which is how gRPC may call a connection that broke."""
    return "BROKEN" if type(error) is GenserveError and "reason" not in error.metadata else error.reason


def _spans(spans: Sequence[WeightSpan]) -> tuple[Span, ...]:
    return tuple(Span(span.version, span.start, span.end, span.lora_version) for span in spans)
