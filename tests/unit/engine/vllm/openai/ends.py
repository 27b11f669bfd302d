"""EngineCore and an OpenAI server, as the daemon sees them: two scripted ends of its relay."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.sampling_params import SamplingParams
from vllm.utils.network_utils import ZmqListener, make_zmq_socket
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from genserve.engine.vllm.openai.link import ServerPlace
from genserve.engine.vllm.start.clients import ClientPlace

READY = b"what the engine says of itself"


def identity(rank: int) -> bytes:
    """How vLLM names an engine on its sockets."""
    return rank.to_bytes(2, "little")


@dataclass
class Meter:
    """A stat logger."""

    num_tokens: int = 0
    running: list[int] = field(default_factory=list)

    def record(self, stats: Any, tokens: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        """vLLM's hook."""
        self.num_tokens += tokens.num_generation_tokens
        if stats is not None:
            self.running.append(stats.num_running_reqs)


@dataclass
class Tally:
    """What all clients have admitted."""

    num_elsewhere: int = 0
    published: int = 0

    def publish(self, num_sequences: int, num_requests: int) -> None:
        """What this one has."""
        assert num_sequences == num_requests
        self.published = num_sequences


class Ends:
    """Sockets that are closed together."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._sockets: list[Any] = []

    def _made(self, address: str, kind: int, **options: Any) -> Any:
        made = make_zmq_socket(self._context, address, kind, linger=0, **options)
        self._sockets.append(made)
        return made

    def close(self) -> None:
        """Closes them."""
        for each in self._sockets:
            each.close(linger=0)
        self._context.term()


class Engines(Ends):
    """The engines of a daemon, which are ready."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        listeners = ServerPlace.new()
        self.place = ClientPlace(0, 2, listeners.requests, listeners.outputs, None)
        self._requests = [
            self._made(self.place.requests.address, zmq.DEALER, bind=False, identity=identity(rank))
            for rank in range(count)
        ]
        for each in self._requests:
            zmq.Socket.shadow(each).send(READY)
        self._outputs = self._made(self.place.outputs.address, zmq.PUSH)

    async def taken(self, rank: int = 0) -> tuple[bytes, Any]:
        """The next message to one of them: its kind, and a request's id, the ids of an abort, or a call's method."""
        kind, *payload = await self._requests[rank].recv_multipart()
        if kind == EngineCoreRequestType.ADD.value:
            return kind, MsgpackDecoder(EngineCoreRequest).decode(payload).request_id
        decoded = MsgpackDecoder().decode(payload)
        return kind, decoded if kind == EngineCoreRequestType.ABORT.value else decoded[2]

    async def step(
        self, tokens: dict[str, list[int]], ended: Sequence[str] = (), rank: int = 0, running: int | None = None
    ) -> None:
        """One of them has sampled tokens; the sequences in `ended` have all they will get."""
        outputs = [
            EngineCoreOutput(each, new, finish_reason=FinishReason.LENGTH if each in ended else None)
            for each, new in tokens.items()
        ]
        stats = None if running is None else SchedulerStats(num_running_reqs=running)
        message = EngineCoreOutputs(engine_index=rank, outputs=outputs, scheduler_stats=stats, weight_version="3")
        await self._outputs.send_multipart(MsgpackEncoder().encode(message))

    async def answer(self, call_id: int) -> None:
        """The answer to a call."""
        await self._outputs.send_multipart(
            MsgpackEncoder().encode(EngineCoreOutputs(utility_output=UtilityOutput(call_id, "as asked")))
        )

    def close(self) -> None:
        """Ends them."""
        super().close()
        for listener in (self.place.requests, self.place.outputs):
            listener.cleanup()


class Server(Ends):
    """An OpenAI server, which inherits the listeners of its place."""

    def __init__(self, place: ServerPlace) -> None:
        super().__init__()
        self._requests = self._adopted(place.requests, zmq.ROUTER)
        self._outputs = self._adopted(place.outputs, zmq.PULL)

    def _adopted(self, listener: ZmqListener, kind: int) -> Any:
        return self._made(listener.address, kind, bind=True, listener=listener.socket)

    async def ready(self) -> tuple[bytes, bytes]:
        """An engine that says that it is ready, and what it says."""
        engine, said = await self._requests.recv_multipart()
        return engine, said

    async def send(self, *frames: bytes, rank: int = 0) -> None:
        """A message to an engine."""
        await self._requests.send_multipart([identity(rank), *frames])

    async def add(self, request_id: str, rank: int = 0, params: SamplingParams | None = None) -> None:
        """A request."""
        request = EngineCoreRequest(request_id, [1, 2], None, params, None, 0.0, None, None, None)
        await self.send(EngineCoreRequestType.ADD.value, *MsgpackEncoder().encode(request), rank=rank)

    async def abort(self, *request_ids: str) -> None:
        """The end of requests."""
        await self.send(EngineCoreRequestType.ABORT.value, msgspec.msgpack.encode(list(request_ids)))

    async def call(self, method: str, call_id: int = 7) -> None:
        """A call of EngineCore's."""
        await self.send(EngineCoreRequestType.UTILITY.value, msgspec.msgpack.encode((0, call_id, method, ())))

    async def got(self) -> EngineCoreOutputs:
        """The next message of an engine."""
        return MsgpackDecoder(EngineCoreOutputs).decode(await self._outputs.recv_multipart())
