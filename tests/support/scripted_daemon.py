"""A real gRPC server on a free port, with the real controllers, on an engine that does as it is told."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from genserve.control.leases import LeaseTable
from genserve.control.pause import PauseController
from genserve.control.sleep import SleepController
from genserve.control.state import ServedWeights, StateBoard
from genserve.engine.generation import (
    ChatPrompt,
    GenerationRequest,
    GenerationUpdate,
    PromptInfo,
    SequenceDelta,
    TextPrompt,
    Usage,
)
from genserve.engine.types import Load
from genserve.ingest.processes import IngestProcesses
from genserve.memory.daemon_processes import DaemonProcesses
from genserve.process.signals import Stopped
from genserve.rpc.observed import CallObserver
from genserve.rpc.server import DaemonServer, ServerParts
from genserve.security.access_list import AccessSource, open_access_list
from genserve.security.caller import Caller
from genserve.settings.config import ServeConfig
from genserve.v1.control_pb2_grpc import ControlServiceStub
from genserve.v1.generation_pb2_grpc import GenerationServiceStub
from genserve.v1.weights_pb2_grpc import WeightServiceStub
from genserve.weights.apply import PushApplier
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.weights.kept.directory import KeptDirectory
from genserve.weights.kept.keeper import Keeper
from genserve.weights.lora.loader import LoraLoader
from genserve.weights.registry import PushRegistry
from genserve.weights.resident import ResidentStore
from genserve.weights.vllm_transfer import TransferUpdates
from tests.support.idle_process import idle_process
from tests.support.scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from genserve.v1.control_pb2_grpc import ControlServiceAsyncStub
    from genserve.v1.generation_pb2_grpc import GenerationServiceAsyncStub
    from genserve.v1.weights_pb2_grpc import WeightServiceAsyncStub

CHECKPOINT = CheckpointIndex({"a": CheckpointTensor("F32", (4,), 16), "b": CheckpointTensor("BF16", (8,), 16)})
MAX_STAGING_BYTES = 1000
MAX_MESSAGE_BYTES = 1 << 20
FIXED_WINDOWS = ("grpc.http2.bdp_probe", 0)
"""For a channel, so that what it keeps for who does not read is the same in every run. gRPC widens windows by what
arrives in a round trip, which takes long on a busy machine."""


def update(token: int, *, first: bool = False, last: bool = False) -> GenerationUpdate:
    """One token."""
    delta = SequenceDelta(0, [token], f"<{token}>", None, [], None)
    return GenerationUpdate(PromptInfo(2, 0, None, None) if first else None, [delta], Usage(2, 0, 1) if last else None)


@dataclass(eq=False)
class ScriptedStream:
    """Gives what the test puts: updates, of which the one with a usage is the last, or an error to raise. `closed` is
    set by `close`."""

    request_id: str
    updates: "asyncio.Queue[GenerationUpdate | BaseException]" = field(default_factory=asyncio.Queue)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    is_finished: bool = False
    is_aborted: bool = False
    _ready: Callable[[], None] | None = None

    def put(self, following: GenerationUpdate | BaseException) -> None:
        """Calls who waits for something."""
        self.updates.put_nowait(following)
        if self._ready is not None:
            self._ready()

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        self._ready = callback
        self.waiting.set()
        for _ in range(self.updates.qsize()):  # each is taken by itself: an engine would have merged them
            callback()

    def take(self) -> GenerationUpdate | None:
        if self.updates.empty():
            return None
        following = self.updates.get_nowait()
        if isinstance(following, BaseException):
            self.is_finished = True
            raise following
        self.is_finished = following.usage is not None
        return following

    def abort(self) -> None:
        self.is_aborted = True

    async def close(self) -> None:
        await asyncio.sleep(0)  # ending a request takes a turn of the loop
        self.closed.set()


class GeneratingEngine(ScriptedEngine):
    """Admits requests as `streams`, after `admission` is set; `refusal` is raised instead."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[GenerationRequest] = []
        self.streams: list[ScriptedStream] = []
        self.submitted = asyncio.Event()
        self.admission = asyncio.Event()
        self.admission.set()
        self.refusal: BaseException | None = None
        self.aborted_ids: list[str] = []
        self.current_load = super().load()

    def load(self) -> Load:
        return self.current_load

    async def submit(self, request: GenerationRequest) -> ScriptedStream:
        self.requests.append(request)
        self.submitted.set()
        await self.admission.wait()
        if self.refusal is not None:
            raise self.refusal
        stream = ScriptedStream(request.request_id)
        self.streams.append(stream)
        return stream

    async def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        self.aborted_ids += request_ids or []
        running = [stream.request_id for stream in self.streams]
        if request_ids is None:
            return running, []
        return [i for i in request_ids if i in running], [i for i in request_ids if i not in running]

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool) -> list[int]:
        text = prompt.text if isinstance(prompt, TextPrompt) else "".join(m.content for m in prompt.messages)
        return [*([0] if add_special_tokens else []), *text.encode()]

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(i for i in token_ids if i or not skip_special_tokens).decode()


@dataclass
class Daemon:
    """What stands between the server and the engine, and stubs for the server."""

    engine: GeneratingEngine
    board: StateBoard
    pauses: PauseController
    resident: ResidentStore
    registry: PushRegistry
    channel: grpc.aio.Channel
    address: str
    parts: ServerParts
    stopped: Stopped

    @property
    def generation(self) -> "GenerationServiceAsyncStub":
        return GenerationServiceStub(self.channel)

    @property
    def weights(self) -> "WeightServiceAsyncStub":
        return WeightServiceStub(self.channel)

    @property
    def control(self) -> "ControlServiceAsyncStub":
        return ControlServiceStub(self.channel)

    async def stream(self, index: int = 0) -> ScriptedStream:
        """The engine's side of a request, once the server waits for its next update."""
        async with asyncio.timeout(30):  # far above what a busy machine takes
            while len(self.engine.streams) <= index:
                await asyncio.sleep(0.001)
            stream = self.engine.streams[index]
            await stream.waiting.wait()
        return stream


@asynccontextmanager
async def serving(
    config: ServeConfig,
    ingest: IngestProcesses | None = None,
    checkpoint: CheckpointIndex | None = CHECKPOINT,
    max_staging_bytes: int = MAX_STAGING_BYTES,
    processes: DaemonProcesses | None = None,
    instance_id: str = "test",
    observers: Sequence[CallObserver] = (),
    opened: DaemonServer | None = None,
    board: StateBoard | None = None,
    engine: GeneratingEngine | None = None,
    base_digest: str = "",
    files: Path | None = None,
) -> AsyncIterator[Daemon]:
    """Everything but the engine is real. `processes` that count as the daemon's own; by default one that is not this
    one, in which the trainer runs as well. `opened` and `board`: of a daemon that listens already. `files`: the model's
    directory, for --keep-committed."""
    engine, leases = engine or GeneratingEngine(), LeaseTable(lambda: time.monotonic(), wall_clock=lambda: time.time())
    board = board or StateBoard(engine, lambda: leases.active, instance_id)
    board.attach(engine)
    pauses = PauseController(engine, leases, board)
    resident = ResidentStore(None, enabled=not config.no_resident_weights)
    board.tell_served(lambda: ServedWeights(resident.push_id, resident.content_digest, base_digest))
    applier = PushApplier(engine, pauses, board, resident)
    loras = LoraLoader(engine, board, pauses, checkpoint)
    pushes = PushRegistry(checkpoint, engine, applier, loras, board, resident, max_staging_bytes)
    transfers = TransferUpdates(engine, pauses, board, pushes, applier, resident)
    stopped = Stopped()
    keeper = None if files is None else Keeper(KeptDirectory(Path(config.keep_committed)), resident, files)
    running = (pauses, pushes.live, transfers) if keeper is None else (pauses, pushes.live, transfers, keeper)
    background = [asyncio.create_task(each.run()) for each in running]
    parts = ServerParts(
        config,
        engine,
        board,
        pauses,
        SleepController(engine, pauses, board, applier),
        pushes,
        resident,
        transfers,
        loras,
        checkpoint,
        max_staging_bytes,
        stopped.stop,
        ingest,
        processes or DaemonProcesses(idle_process().pid),
        callers=open_access_list(AccessSource(config.auth_file)),
        peers=Caller(config.peers),
        observers=observers,
        keeper=keeper,
    )
    server = opened or await DaemonServer.open(config, board, parts.callers, observers)
    await server.serve(parts)
    try:
        async with grpc.aio.insecure_channel(server.address, options=[FIXED_WINDOWS]) as channel:
            yield Daemon(engine, board, pauses, resident, pushes, channel, server.address, parts, stopped)
    finally:
        await server.stop(0)
        for task in background:
            task.cancel()
        await asyncio.wait(background)
        await pushes.close()
        resident.release_memory()  # this process goes on, where a daemon's ends
        engine.loras.close()


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """The reason in the details of an error; its domain is ours."""
    info = detail_of(error, error_details_pb2.ErrorInfo)
    assert info.domain == "genserve"
    return str(info.reason)


def field_of(error: grpc.aio.AioRpcError) -> str:
    """The path of the one field that an error is about."""
    (violation,) = detail_of(error, error_details_pb2.BadRequest).field_violations
    return str(violation.field)


def detail_of(error: grpc.aio.AioRpcError, kind: type) -> error_details_pb2.ErrorInfo:
    """The one detail of a kind."""
    (value,) = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    status = status_pb2.Status.FromString(value)
    assert (status.code, status.message) == (error.code().value[0], error.details())
    (found,) = [each for each in status.details if each.Is(kind.DESCRIPTOR)]
    message = kind()
    found.Unpack(message)
    return message
