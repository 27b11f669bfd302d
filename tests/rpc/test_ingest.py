"""Pushes that come through a process of their own: the same answers as from the daemon itself."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
import grpc
import grpc.aio
import numpy
import psutil
import pytest

from genserve.client import AsyncClient
from genserve.ingest.processes import IngestProcesses
from genserve.ingest.relay import METHOD, SERVICE, IngestSettings
from genserve.memory.daemon_processes import DaemonProcesses
from genserve.memory.ring import NAME_PREFIX, NUM_PIECES, PIECE_BYTES
from genserve.process import supervisor
from genserve.settings.config import ServeConfig
from genserve.v1 import weights_pb2
from genserve.v1.control_pb2 import GetServerInfoRequest
from genserve.v1.weights_pb2_grpc import WeightServiceStub
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from tests.rpc.frames import DATA, END, Frame, chunk, header
from tests.rpc.segments import WEIGHTS, has_bytes, memory, segment
from tests.support.answers import answer_of
from tests.support.patience import START_S, until
from tests.support.said import Said
from tests.support.scripted_daemon import MAX_MESSAGE_BYTES, Daemon, field_of, reason_of, serving

if TYPE_CHECKING:
    from genserve.v1.weights_pb2_grpc import WeightServiceAsyncStub


@dataclass
class Relayed:
    """A daemon with one receiving process, and a plain stub for that."""

    daemon: Daemon
    processes: IngestProcesses
    stub: "WeightServiceAsyncStub"

    async def refused(self, *frames: Frame) -> grpc.aio.AioRpcError:
        """The error with which a push ends."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer_of(self.stub.PushWeights(iter(frames), timeout=30))
        return caught.value


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Said:
    return Said(capfd)


def received_up_to(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    """The options of a server that refuses larger messages."""
    return (("grpc.max_receive_message_length", max_message_bytes),)


@pytest.fixture(scope="module")
async def processes() -> AsyncIterator[IngestProcesses]:
    """One process; it takes a second to start."""
    processes = IngestProcesses(1, IngestSettings("127.0.0.1", 0, "", received_up_to(4 * PIECE_BYTES)))
    await processes.start()
    try:
        yield processes
    finally:
        await processes.stop()
        assert not any(psutil.pid_exists(pid) for pid in processes.pids)


@pytest.fixture
async def relayed(processes: IngestProcesses) -> AsyncIterator[Relayed]:
    """A daemon of its own for each test."""
    async with (
        serving(ServeConfig(port=0, max_message_bytes=MAX_MESSAGE_BYTES), processes) as daemon,
        grpc.aio.insecure_channel(f"127.0.0.1:{processes.ports[0]}") as channel,
    ):
        yield Relayed(daemon, processes, WeightServiceStub(channel))


async def test_a_push_is_applied(relayed: Relayed) -> None:
    """Chunks in any order and twice, with and without a checksum, from a client that knows nothing of it."""
    unchecked = Frame(chunk=weights_pb2.PushChunk(offset=5, data=DATA[5:9]))
    frames = [await header(relayed.daemon), chunk(20, 32), chunk(0, 7), unchecked, chunk(7, 20), chunk(3, 30), END]
    response = await answer_of(relayed.stub.PushWeights(iter(frames), timeout=30))
    assert response.applied.active_version == 1
    assert relayed.daemon.engine.live == {"a": DATA[:16], "b": DATA[16:]}


async def test_errors_are_those_of_the_daemon(relayed: Relayed) -> None:
    """Code, reason and details, for whatever is wrong."""
    first = await header(relayed.daemon)
    other = Frame(chunk=weights_pb2.PushChunk(offset=0, data=b"x" * 9))
    cases = {
        "CHECKSUM_MISMATCH": [first, chunk(0, 32, crc32c=1), END],
        "CHUNK_OUT_OF_RANGE": [first, chunk(0, 32, offset=1), END],
        "PUSH_TRUNCATED": [first, chunk(0, 32)],
        "PUSH_CONFLICT": [first, chunk(0, 20), other, END],
        "INVALID_FIELD": [chunk(0, 20), END],
        "MANIFEST_MISMATCH": [Frame(header=weights_pb2.PushHeader(weight_version=1, manifest={"total_bytes": 1})), END],
    }
    for reason, frames in cases.items():
        error = await relayed.refused(*frames)
        assert reason_of(error) == reason
    assert relayed.daemon.engine.weight_version == 0


async def test_its_clients_hand_no_memory_over(relayed: Relayed) -> None:
    """They may be anywhere, though the process itself is on the daemon's host."""
    with memory() as (path, _):
        error = await relayed.refused(await header(relayed.daemon), segment(path), END)
    assert (error.code(), field_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "segment")


RING = f"/memfd:{NAME_PREFIX}"


def files_of(pid: int) -> dict[str, int]:
    """The open files of a process by name, of equal ones that with the lowest number."""
    found = {}
    for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd")), reverse=True):
        with suppress(FileNotFoundError):  # closed meanwhile
            found[os.readlink(f"/proc/{pid}/fd/{number}")] = number
    return found


@pytest.mark.parametrize("names_one", [True, False])
async def test_its_clients_name_no_pipe_of_the_process(processes: IngestProcesses, names_one: bool) -> None:
    """They may guess where its memory is, which is what their own chunks were; a pipe beside it is not theirs, and
    pieces of that memory are acknowledged on its own pipe or not taken at all."""
    (pid,) = processes.pids
    async with (
        serving(ServeConfig(port=0), processes, processes=DaemonProcesses()) as daemon,
        grpc.aio.insecure_channel(f"127.0.0.1:{processes.ports[0]}") as channel,
    ):

        async def frames() -> AsyncIterator[Frame]:
            yield await header(daemon)
            yield chunk(0, 20)
            while not (rings := [n for name, n in files_of(pid).items() if name.startswith(RING)]):
                await asyncio.sleep(0.01)  # until it has the chunk
            (ring,) = rings
            pipe = next(n for name, n in files_of(pid).items() if name.startswith("pipe:"))
            yield segment(f"/proc/{pid}/fd/{ring}", 0, 20, taken_path=f"/proc/{pid}/fd/{pipe}" if names_one else "")

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer_of(WeightServiceStub(channel).PushWeights(frames(), timeout=30))
    assert field_of(caught.value) == "segment.taken_path"


@pytest.mark.parametrize("flags", [{}, {"no_shared_memory": True}])
@pytest.mark.parametrize("with_process", [True, False])
async def test_what_processes_pass_on_comes_to_their_own_socket_alone(
    processes: IngestProcesses, tmp_path: Path, flags: dict[str, bool], with_process: bool
) -> None:
    """A client that calls what they call is told that there is no such method."""
    config = ServeConfig(port=0, uds=str(tmp_path / "public"), max_message_bytes=MAX_MESSAGE_BYTES, **flags)
    async with serving(config, processes if with_process else None) as daemon:
        for address in (daemon.address, f"unix:{config.uds}"):
            async with grpc.aio.insecure_channel(address) as channel:
                method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(f"/{SERVICE}/{METHOD}")
                # Nothing is sent: a write after the answer would hide it.
                assert await method(timeout=30).code() is grpc.StatusCode.UNIMPLEMENTED
        if with_process:
            frames = [await header(daemon), chunk(0, 32), END]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{processes.ports[0]}") as channel:
                response = await answer_of(WeightServiceStub(channel).PushWeights(iter(frames), timeout=30))
            assert response.applied.active_version == 1, "the control: the process can"


def test_nobody_else_reaches_the_socket(processes: IngestProcesses) -> None:
    """It lies in a directory of this user alone: what comes there is trusted."""
    directory = Path(processes.address.removeprefix("unix:")).parent
    assert directory.stat().st_mode & 0o777 == 0o700


async def test_more_bytes_than_the_ring_go_round(relayed: Relayed) -> None:
    """The memory of the process is written again and again; the daemon copies each piece before that."""
    data = bytes(900_000)
    crc32c = google_crc32c.value(data)

    async def frames() -> AsyncIterator[Frame]:
        yield await header(relayed.daemon)
        for _ in range(80):  # repeats of what lies behind the end of the push: the first one would be refused
            yield Frame(chunk=weights_pb2.PushChunk(offset=0, data=DATA, crc32c=google_crc32c.value(DATA)))
        yield Frame(chunk=weights_pb2.PushChunk(offset=0, data=data, crc32c=crc32c))

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer_of(relayed.stub.PushWeights(frames(), timeout=30))
    assert reason_of(caught.value) == "CHUNK_OUT_OF_RANGE"


@pytest.mark.slow
async def test_a_chunk_may_be_larger_than_a_piece_of_the_ring(processes: IngestProcesses) -> None:
    """It is cut: every byte arrives in its place, also after the ring has been written once."""
    chunk_bytes, num_chunks = 2 * PIECE_BYTES + 5, NUM_PIECES
    size_bytes = chunk_bytes * num_chunks
    weights = numpy.random.default_rng(0).integers(0, 256, size_bytes, "uint8")
    checkpoint = CheckpointIndex({"w": CheckpointTensor("U8", (size_bytes,), size_bytes)})
    async with (
        serving(ServeConfig(port=0), processes, checkpoint, 2 * size_bytes) as daemon,
        grpc.aio.insecure_channel(f"127.0.0.1:{processes.ports[0]}") as channel,
    ):

        async def frames() -> AsyncIterator[Frame]:
            yield await header(daemon)
            for start in range(0, size_bytes, chunk_bytes):
                data = weights[start : start + chunk_bytes].tobytes()
                yield Frame(chunk=weights_pb2.PushChunk(offset=start, data=data, crc32c=google_crc32c.value(data)))
            yield END

        response = await answer_of(WeightServiceStub(channel).PushWeights(frames(), timeout=30))
        assert response.applied.active_version == 1
        assert daemon.engine.live == {"w": weights.tobytes()}


async def test_the_client_uses_it_where_it_can_be_reached(relayed: Relayed, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes to the daemon where it cannot."""
    monkeypatch.setattr("genserve.transport.channels.PUSH_MIN_BYTES", 0)
    info = await relayed.daemon.control.GetServerInfo(GetServerInfoRequest())
    assert list(info.ingest_ports) == list(relayed.processes.ports)
    relays: list[str] = []
    push = relayed.daemon.registry.open

    async def opened(header: object) -> object:
        relays.append("opened")
        return await push(header)  # type: ignore[arg-type]

    monkeypatch.setattr(relayed.daemon.registry, "open", opened)
    async with AsyncClient(relayed.daemon.address) as client:
        for streams in (1, 3):
            result = await client.push_weights(WEIGHTS, version=streams, streams=streams, shared_memory=False)
            assert result.applied is not None
        monkeypatch.setattr("genserve.transport.channels.CONNECT_TIMEOUT_S", 0.2)
        monkeypatch.setattr(IngestProcesses, "ports", (1,))
    async with serving(ServeConfig(port=0), None) as unreachable, AsyncClient(unreachable.address) as client:
        assert (await client.push_weights(WEIGHTS, version=1, streams=2, shared_memory=False)).applied is not None


@pytest.mark.slow
async def test_one_that_dies_again_and_again_stays_down(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on, and its port is not told any more: clients push to the daemon itself."""
    monkeypatch.setattr(supervisor, "FIRST_WAIT_S", 0.01)
    processes = IngestProcesses(2, IngestSettings("127.0.0.1", 0, "", received_up_to(MAX_MESSAGE_BYTES)))
    await processes.start()
    keeping = asyncio.create_task(processes.run())
    dying, other = processes.ports
    try:
        async with serving(ServeConfig(port=0), processes) as daemon, asyncio.timeout(START_S):
            while len(processes.ports) == 2:
                with suppress(ProcessLookupError):
                    os.kill(processes.pids[0], signal.SIGKILL)
                await asyncio.sleep(0.05)
            assert processes.ports == (other,)
            assert list((await daemon.control.GetServerInfo(GetServerInfoRequest())).ingest_ports) == [other]
            assert not keeping.done()
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await processes.stop()
    first, *_, last = said.lines
    assert first == f"receiving process on port {dying}: it was ended by SIGKILL; it is started again in 0.01 s"
    assert re.fullmatch(rf"receiving process on port {dying}: it .*, 5 times within \d+ s; it stays down", last)


@pytest.mark.slow
async def test_one_that_is_killed_is_started_again(said: Said) -> None:
    """Its stream ends UNAVAILABLE, what the daemon has stays, and a resume through the next one completes it."""
    processes = IngestProcesses(1, IngestSettings("127.0.0.1", 0, "", received_up_to(MAX_MESSAGE_BYTES)))
    await processes.start()
    keeping = asyncio.create_task(processes.run())
    try:
        async with (
            serving(ServeConfig(port=0), processes) as daemon,
            grpc.aio.insecure_channel(f"127.0.0.1:{processes.ports[0]}") as channel,
        ):
            first, (killed,) = await header(daemon, attempt="a"), processes.pids

            async def frames() -> AsyncIterator[Frame]:
                yield first
                yield chunk(0, 20)
                await until(lambda: has_bytes(daemon, 20))
                os.kill(killed, signal.SIGKILL)
                await asyncio.Event().wait()

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer_of(WeightServiceStub(channel).PushWeights(frames(), timeout=30))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await until(lambda: said.lines and processes.pids[0] != killed)
            report = daemon.registry.report("p1").push
            assert report.missing == ((20, 32),)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{processes.ports[0]}") as another:
                stub = WeightServiceStub(another)
                response = await answer_of(
                    stub.PushWeights(iter([first, chunk(20, 32), END]), timeout=20, wait_for_ready=True)
                )
            assert response.applied.active_version == 1
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await processes.stop()
    assert len(said.lines) == 1
