"""Shared memory instead of bytes: taken from trainers on this host, and only what was meant for it."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import google_crc32c
import grpc.aio
import pytest

from genserve.v1 import weights_pb2
from tests.rpc.frames import DATA, END, Frame, chunk, header, push, refused
from tests.rpc.segments import has_bytes, memory, pipe, segment
from tests.support.answers import answer_of
from tests.support.patience import STEP_S, until
from tests.support.scripted_daemon import Daemon, field_of, reason_of


async def test_memory_of_a_peer_on_this_host_is_copied(daemon: Daemon) -> None:
    """With and without a checksum, in pieces, at other places than in the byte space, between chunks."""
    with memory(b"--" + DATA) as (path, _):
        frames = [
            await header(daemon),
            segment(path, 20, 32, segment_offset=22),
            chunk(0, 7),
            segment(path, 7, 20, segment_offset=9, crc32c=google_crc32c.value(DATA[7:20])),
            END,
        ]
        response = await push(daemon, frames)
    assert response.applied.active_version == 1
    assert daemon.engine.live == {"a": DATA[:16], "b": DATA[16:]}


@pytest.fixture
def named() -> Iterator[Path]:
    """Memory as shm_open makes it."""
    path = Path(f"/dev/shm/genserve-push-{os.getpid()}")
    path.write_bytes(DATA)
    yield path
    path.unlink()


async def test_memory_with_a_name_is_copied(daemon: Daemon, named: Path) -> None:
    """From /dev/shm."""
    assert (await push(daemon, [await header(daemon), segment(str(named)), END])).applied.active_version == 1


async def test_bytes_that_are_there_are_compared(daemon: Daemon) -> None:
    """Equal ones may come again; other ones are the end of the push, as with chunks."""
    first = await header(daemon)
    with memory() as (path, fd):
        frames = [first, chunk(0, 20), segment(path, 10, 32), segment(path), chunk(3, 9)]
        await refused(daemon, frames)  # without an end
        os.pwrite(fd, b"\xff\xff", 30)
        error = await refused(daemon, [first, segment(path), END])
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.ALREADY_EXISTS, "PUSH_CONFLICT")
    again = await refused(daemon, [first, END])
    assert reason_of(again) == "PUSH_CONFLICT", "whoever takes part in it is told"
    assert daemon.engine.weight_version == 0


async def test_memory_that_differs_from_its_checksum_is_data_loss(daemon: Daemon) -> None:
    """And counts as not sent."""
    first = await header(daemon)
    with memory() as (path, _):
        error = await refused(daemon, [first, segment(path, crc32c=1), END])
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.DATA_LOSS, "CHECKSUM_MISMATCH")
        asked = await daemon.weights.GetPush(weights_pb2.GetPushRequest(push_id="p1"))
        assert asked.push.received_bytes == 0
        assert (await push(daemon, [first, segment(path), END])).applied.active_version == 1


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What a hostile trainer would like the daemon to read."""
    (tmp_path / "genserve-push").write_bytes(DATA)
    link = Path(f"/dev/shm/genserve-push-link-{os.getpid()}")
    link.symlink_to("/etc/passwd")
    fifo = Path(f"/dev/shm/genserve-push-fifo-{os.getpid()}")
    os.mkfifo(fifo)
    others = Path(f"/dev/shm/genserve-push-other-{os.getpid()}")
    others.write_bytes(DATA)
    if os.geteuid() == 0:
        os.chown(others, 65534, 65534)
    read, write = os.pipe()
    passwd = os.open("/etc/passwd", os.O_RDONLY)
    with memory(name="secret") as (secret, _):
        yield {
            "a file": "/etc/passwd",
            "up and away": "/dev/shm/genserve-push/../../etc/passwd",
            "a file of that name": str(tmp_path / "genserve-push"),
            "a link": str(link),
            "a pipe with a name": str(fifo),
            "a pipe": f"/proc/{os.getpid()}/fd/{read}",
            "an open file": f"/proc/{os.getpid()}/fd/{passwd}",
            "a device": "/proc/self/fd/0",
            "other memory": secret,
            "another user's": str(others) if os.geteuid() == 0 else "/proc/1/fd/0",
            "nothing": "/dev/shm/genserve-push-nothing",
            "no path": "",
            "a number without end": f"/proc/{'9' * 5000}/fd/1",
            "a zero": "/dev/shm/genserve-push\0",
        }
    for fd in (read, write, passwd):
        os.close(fd)
    for path in (link, fifo, others):
        path.unlink()


async def test_no_other_file_is_read(daemon: Daemon, paths: dict[str, str]) -> None:
    """Whatever it is: INVALID_FIELD "segment.path"."""
    first = await header(daemon)
    for name, path in paths.items():
        error = await refused(daemon, [first, segment(path), END])
        assert (error.code(), field_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "segment.path"), name


@pytest.mark.parametrize("fields", [{"segment_offset": 1}, {"segment_offset": 2**64 - 1}, {"length": 65 << 20}])
async def test_memory_that_is_too_short_is_refused(daemon: Daemon, fields: dict[str, int]) -> None:
    """Before anything is copied."""
    with memory() as (path, _):
        error = await refused(daemon, [await header(daemon), segment(path, **fields), END])
    assert field_of(error) == "segment.length"


async def test_a_trainer_is_told_what_has_been_copied(daemon: Daemon) -> None:
    """Piece by piece, also of bytes that are there already; it writes others to the same memory then."""
    first = await header(daemon)
    with memory(DATA[:8]) as (path, fd), pipe() as (taken_path, reading):

        async def frames() -> AsyncIterator[Frame]:
            yield first
            for start in (0, 8, 16, 24, 24):
                os.pwrite(fd, DATA[start : start + 8], 0)
                yield segment(path, start, start + 8, segment_offset=0, taken_path=taken_path)
                assert await asyncio.wait_for(asyncio.to_thread(os.read, reading, 2), STEP_S) == b"\0"
            yield END

        response = await answer_of(daemon.weights.PushWeights(frames(), timeout=30))
    assert response.applied.active_version == 1
    assert daemon.engine.live == {"a": DATA[:16], "b": DATA[16:]}


@pytest.mark.parametrize("one_pipe", [True, False])
async def test_each_piece_may_lie_in_memory_of_its_own(daemon: Daemon, one_pipe: bool) -> None:
    """Closed once the piece has been taken: the next memory, and the next pipe, get the numbers of those before."""
    first = await header(daemon)
    paths: set[tuple[str, str]] = set()

    async def frames() -> AsyncIterator[Frame]:
        yield first
        with pipe() as shared:
            for start in range(0, 32, 8):
                with memory(DATA[start : start + 8]) as (path, _), pipe() as own:
                    taken_path, reading = shared if one_pipe else own
                    paths.add((path, taken_path))
                    yield segment(path, start, start + 8, segment_offset=0, taken_path=taken_path)
                    assert await asyncio.wait_for(asyncio.to_thread(os.read, reading, 2), STEP_S) == b"\0"
        yield END

    await answer_of(daemon.weights.PushWeights(frames(), timeout=30))
    assert len(paths) == 1
    assert daemon.engine.live == {"a": DATA[:16], "b": DATA[16:]}


def make_anew(path: Path, data: bytes) -> None:
    """Other memory of the same name."""
    path.unlink()
    path.write_bytes(data)


async def test_memory_with_a_name_may_be_made_anew(daemon: Daemon, named: Path) -> None:
    """What a trainer makes anew under its name in /dev/shm is read anew."""
    first = await header(daemon)

    async def frames() -> AsyncIterator[Frame]:
        yield first
        yield segment(str(named), 0, 16)
        await until(lambda: has_bytes(daemon, 16))
        make_anew(named, DATA[16:])
        yield segment(str(named), 16, 32, segment_offset=0)
        yield END

    await answer_of(daemon.weights.PushWeights(frames(), timeout=30))
    assert daemon.engine.live == {"a": DATA[:16], "b": DATA[16:]}


async def test_nothing_but_a_pipe_is_told(daemon: Daemon, paths: dict[str, str], tmp_path: Path) -> None:
    """INVALID_FIELD "segment.taken_path", for a file of this user as well: nothing is written to it."""
    kept = os.open(tmp_path / "kept", os.O_CREAT | os.O_RDWR)
    paths |= {"a file that may be written": f"/proc/{os.getpid()}/fd/{kept}"}
    first = await header(daemon)
    with memory() as (path, fd):
        paths |= {"the memory itself": f"/proc/{os.getpid()}/fd/{fd}"}
        for name, taken_path in paths.items():
            if name not in ("no path", "a pipe"):  # none is asked for; and a pipe is a pipe, whichever end is named
                error = await refused(daemon, [first, segment(path, taken_path=taken_path), END])
                assert (error.code(), field_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "segment.taken_path"), name
    assert os.fstat(kept).st_size == 0
    os.close(kept)


async def test_a_pipe_of_another_process_is_not_told(daemon: Daemon, named: Path) -> None:
    """Whoever hands memory over names pipes of his own: memory in /dev/shm is no process's."""
    with pipe() as (taken_path, reading):
        error = await refused(daemon, [await header(daemon), segment(str(named), taken_path=taken_path), END])
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    assert field_of(error) == "segment.taken_path"


async def test_a_pipe_that_is_full_ends_the_stream(daemon: Daemon) -> None:
    """The daemon waits for nobody, whose piece it copies or compares."""
    first = await header(daemon)
    with memory() as (path, _), pipe() as (taken_path, _):
        writing = int(taken_path.rpartition("/")[2])
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, bytes(4096))
        for _ in range(2):
            error = await refused(daemon, [first, segment(path, taken_path=taken_path), END])
            assert (error.code(), field_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "segment.taken_path")
    assert (await push(daemon, [first, chunk(0, 32), END])).applied.active_version == 1, "it can be sent otherwise"


async def test_failure_reaches_a_sender_that_waits_for_its_memory(daemon: Daemon) -> None:
    """One piece is wrong: the rest is told to be taken, so that its owner sends on, and gets the error."""
    first = await header(daemon)
    with memory() as (path, _), pipe() as (taken_path, reading):

        async def frames() -> AsyncIterator[Frame]:
            yield first
            for start in range(0, 32, 8):
                yield segment(path, start, start + 8, taken_path=taken_path, **({"crc32c": 1} if start == 8 else {}))
                await asyncio.to_thread(os.read, reading, 1)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer_of(daemon.weights.PushWeights(frames(), timeout=30))
    assert reason_of(caught.value) == "CHECKSUM_MISMATCH"
    asked = await daemon.weights.GetPush(weights_pb2.GetPushRequest(push_id="p1"))
    assert asked.push.received_bytes < 32


async def test_memory_that_is_shortened_meanwhile_is_an_error(daemon: Daemon) -> None:
    """No SIGBUS: the stream has it open, and the second piece is gone."""
    first = await header(daemon)
    with memory() as (path, fd):

        async def frames() -> AsyncIterator[Frame]:
            yield first
            yield segment(path, 0, 16)
            await until(lambda: has_bytes(daemon, 16))
            os.ftruncate(fd, 20)
            yield segment(path, 16, 32)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer_of(daemon.weights.PushWeights(frames(), timeout=30))
    assert field_of(caught.value) == "segment.length"


async def test_a_piece_behind_the_end_is_out_of_range(daemon: Daemon) -> None:
    """As a chunk would be."""
    with memory() as (path, _):
        error = await refused(daemon, [await header(daemon), segment(path, offset=1), END])
        assert reason_of(error) == "CHUNK_OUT_OF_RANGE"


async def test_peers_elsewhere_hand_nothing_over(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would have the daemon read what they may not."""
    monkeypatch.setattr("genserve.weights.push.segments.is_local", lambda _: False)
    with memory() as (path, _):
        error = await refused(daemon, [await header(daemon), segment(path), END])
    assert (error.code(), field_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "segment")
