"""Passes requests of an OpenAI server on to EngineCore, and outputs back.

The server would be a client of EngineCore like the daemon, with everything that a client may do. The daemon stands
between the two, so that it alone controls the engine: the server submits and aborts its own requests, and nothing else.
So the daemon also knows which of them are unfinished, and EngineCore does not notice when a server dies and another one
takes its place.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio
from vllm.utils.network_utils import ZmqListener, make_zmq_socket
from vllm.v1.engine import FinishReason
from vllm.v1.engine.core import EngineCoreProc

from genserve.engine.vllm.clients.interruption import Heard, Watch
from genserve.engine.vllm.clients.rows import ClientRow
from genserve.engine.vllm.openai import messages
from genserve.engine.vllm.openai.link import ServerLink, ServerPlace
from genserve.engine.vllm.openai.messages import Call, Frames
from genserve.engine.vllm.requests import refusals
from genserve.engine.vllm.requests.running import Tally
from genserve.engine.vllm.start.clients import ClientPlace

log = logging.getLogger(__name__)

_READY_TIMEOUT_S = 60.0
_HARMLESS: Final = frozenset({"get_supported_tasks", "is_sleeping", "is_scheduler_paused", "get_weight_version"})
"""Calls that change nothing."""
_NOT_NEEDED: Final = frozenset({"reset_mm_cache"})
"""Calls that a server makes when it starts, and that would disturb an engine that runs."""


@dataclass(slots=True)
class _Sequence:
    """One unfinished sequence. `last_output_s` is on the monotonic clock, 0.0 before the first output."""

    engine: bytes
    num_tokens: int
    last_output_s: float = 0.0

    def hear(self, num_tokens: int, now_s: float) -> float | None:
        """Output came. Seconds since the one before; None if it is the first one."""
        gap_s = now_s - self.last_output_s if self.last_output_s else None
        self.num_tokens += num_tokens
        self.last_output_s = now_s
        return gap_s


class Relay:
    """The client of the engine at `place`. `engines`: their identities on vLLM's sockets; `tally`: what all clients
    have admitted; `max_active`: unfinished sequences of all clients, above which new ones fail; `row`: gets the
    statistics that EngineCore sends here; `serving`: what decides which requests the engine takes."""

    def __init__(
        self,
        place: ClientPlace,
        engines: Sequence[bytes],
        tally: Tally,
        max_active: int,
        row: ClientRow,
        serving: refusals.Serving,
    ) -> None:
        """Call it when the engines have started: waits until each has said so. Raises TimeoutError."""
        self.place = place
        """The client of the engine that the server is."""
        self._tally = tally
        self._max_active = max_active
        self._row = row
        self._serving = serving
        self._running: dict[str, _Sequence] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._link: ServerLink | None = None
        self.broken = asyncio.Event()
        """Set when the server does not behave: its process must be ended. `why_broken` says more."""
        self.why_broken = ""
        self._context = zmq.Context()
        self._sockets: list[Any] = []
        try:
            # Only one of the two directions of a socket is used: zmq.asyncio would miss messages otherwise.
            self._to_engines = self._bound(self._context, zmq.ROUTER, place.requests)
            self._from_engines = self._bound(zmq.asyncio.Context(self._context), zmq.PULL, place.outputs)
            self._ready = self._said_by(engines)
        except BaseException:
            self._close_sockets()
            raise

    def _bound(self, context: Any, kind: int, listener: ZmqListener) -> Any:
        bound = make_zmq_socket(context, listener.address, kind, bind=True, listener=listener.socket)
        self._sockets.append(bound)
        return bound

    def _close_sockets(self) -> None:
        for each in self._sockets:
            each.close(linger=0)
        self._context.term()

    def _said_by(self, engines: Sequence[bytes]) -> dict[bytes, bytes]:
        """What each engine tells a new client about itself. It says this once, so it is kept for every server."""
        said: dict[bytes, bytes] = {}
        while len(said) < len(engines):
            if not self._to_engines.poll(int(1000 * _READY_TIMEOUT_S)):
                raise TimeoutError("the engine does not connect to the place of the OpenAI server")
            identity, payload = self._to_engines.recv_multipart()
            said[identity] = payload
        return said

    @property
    def num_requests(self) -> int:
        """Sequences of the server that are unfinished."""
        return len(self._running)

    async def run(self) -> None:
        """Passes outputs on. Never returns."""
        while True:
            self._take(await self._from_engines.recv_multipart(copy=False))
            await asyncio.sleep(0)  # to receive what is there already lets nobody else have a turn

    def open(self) -> ServerPlace:
        """A place for a new server process. Call `shut` when this process has ended."""
        self.broken.clear()
        self._link = ServerLink(self._context, self._ready, self._pass_on, self._break)
        return self._link.place

    def shut(self) -> None:
        """The server process has ended: aborts what it has left, and closes its place."""
        if self._link is not None:
            self._link.close()
            self._link = None
        self._abort_in_engines(list(self._running))

    def close(self) -> None:
        """Closes all sockets."""
        self.shut()
        self._close_sockets()

    async def abort(self, request_ids: Sequence[str] | None) -> list[str]:
        """Ends sequences (None = all); the ids that ran. The server answers their requests with what it has of them."""
        wanted = list(self._running) if request_ids is None else [i for i in request_ids if i in self._running]
        for engine, ids in self._abort_in_engines(wanted).items():
            self._tell(messages.ended(_index(engine), ids, FinishReason.ABORT))
        return wanted

    async def pausing(self) -> int:
        """The engine aborts all sequences from now on. How many there are."""
        return len(self._running)

    async def paused(self) -> None:
        """The engine has aborted them, and told the server."""

    def interrupted(self) -> "asyncio.Future[int]":
        """Nothing is scheduled: watches the sequences from now on. Tokens that these have computed."""
        watch = Watch(self._running, lambda each: Heard(each.last_output_s, each.num_tokens))
        self._row.interruptions.begin(watch)
        known: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        known.set_result(watch.num_computed_tokens)
        return known

    async def longest_wait_s(self) -> float | None:
        """The longest time that one of them was without output, when all have output again or have ended; None if none
        was."""
        return await self._row.interruptions.longest_wait_s()

    async def wait_idle(self) -> None:
        """Returns when no sequence of the server is left."""
        await self._idle.wait()

    def _take(self, frames: list[Any]) -> None:
        """One message of an engine."""
        if frames[0].buffer != EngineCoreProc.ENGINE_CORE_DEAD:
            step = messages.outputs_of(frames[0].buffer)
            gaps_s = list(self._gaps_s(step.outputs))
            self._forget(each.request_id for each in step.outputs if each.finish_reason is not None)
            if step.outputs or step.scheduler_stats is not None:
                tokens = messages.StepTokens(sum(len(each.new_token_ids) for each in step.outputs), gaps_s)
                self._row.record(step.scheduler_stats, tokens, engine_idx=step.engine_index)
        self._tell(frames)

    def _gaps_s(self, outputs: Iterable[messages.Output]) -> Iterator[float]:
        """How long each sequence with new tokens was without any."""
        now_s = time.monotonic()
        for output in outputs:
            sequence = self._running.get(output.request_id)
            if sequence is not None and output.new_token_ids:
                gap_s = sequence.hear(len(output.new_token_ids), now_s)
                if gap_s is not None:
                    yield gap_s

    def _pass_on(self, engine: bytes, frames: Sequence[Any]) -> None:
        """One message of the server to an engine. Raises msgspec.DecodeError for what is none."""
        kind, payload = bytes(frames[0].buffer), frames[1].buffer
        if kind == messages.ADD:
            request = messages.request_of(payload)
            request_id = request.request_id
            if len(self._running) + self._tally.num_elsewhere >= self._max_active or self._is_refused(request):
                self._tell(messages.ended(_index(engine), [request_id], FinishReason.ERROR))
                return
            self._running[request_id] = _Sequence(engine, len(request.prompt_token_ids or ()))
            self._idle.clear()
            self._publish()
        elif kind == messages.ABORT:
            self._abort_in_engines([each for each in messages.ids_of(payload) if each in self._running])
            return
        elif kind == messages.UTILITY:
            call = messages.call_of(payload)
            if call.method not in _HARMLESS:
                self._tell(self._instead_of(engine, call))
                return
        else:
            raise msgspec.DecodeError(f"a message of the kind {kind!r}")
        self._to_engines.send_multipart([engine, *frames], copy=False)

    def _is_refused(self, request: messages.Request) -> bool:
        """Whether the engine does not take it. `checked` has refused most of these in the server, with an
        answer that says why. Here it is known what words have become."""
        refused = ["an adapter: only genserve loads these"] if bytes(request.lora_request) != messages.NIL else []
        if request.sampling_params is not None:  # None: not a request for tokens
            rows = refusals.refused(request.sampling_params, self._serving)
            refused += [f"{row.parameter} {row.message}" for row in rows]
        if refused:
            log.warning("request %s on the OpenAI port ends with an error: %s", request.request_id, "; ".join(refused))
        return bool(refused)

    def _instead_of(self, engine: bytes, call: Call) -> Frames:
        """The answer to a call that the engine does not get."""
        if call.method in _NOT_NEEDED:
            return messages.done(_index(engine), call)
        return messages.refused(
            _index(engine), call, f"{call.method}: only genserve's gRPC services control the engine of this server"
        )

    def _abort_in_engines(self, request_ids: Sequence[str]) -> dict[bytes, list[str]]:
        """Ends running sequences; their ids by engine. EngineCore says nothing more of them."""
        by_engine: dict[bytes, list[str]] = defaultdict(list)
        for each in request_ids:
            by_engine[self._running[each].engine].append(each)
        for engine, ids in by_engine.items():
            self._to_engines.send_multipart([engine, *messages.abort(ids)])
        self._forget(request_ids)
        return by_engine

    def _forget(self, request_ids: Iterable[str]) -> None:
        for each in request_ids:
            self._running.pop(each, None)
        self._publish()
        if not self._running:
            self._idle.set()

    def _publish(self) -> None:
        self._tally.publish(len(self._running), len(self._running))

    def _tell(self, frames: Sequence[Any]) -> None:
        """A message to the server, if there is one."""
        if self._link is not None:
            self._link.send(frames)

    def _break(self, why: str) -> None:
        self.why_broken = why
        self.broken.set()


def _index(engine: bytes) -> int:
    """internal: vLLM identifies an engine by its data-parallel rank."""
    return int.from_bytes(engine, "little")
