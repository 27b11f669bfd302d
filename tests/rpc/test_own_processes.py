"""What the daemon's own processes have open cannot be handed over: neither memory nor pipes."""

import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager

import grpc.aio
import pytest

from genserve.memory.daemon_processes import DaemonProcesses
from genserve.settings.config import ServeConfig
from tests.rpc.frames import END, header, push, refused
from tests.rpc.segments import memory, pipe, segment
from tests.support.descriptor_holders import child, stranger
from tests.support.scripted_daemon import Daemon, field_of, serving


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    """This process and its children are the daemon's."""
    async with serving(ServeConfig(port=0), processes=DaemonProcesses()) as running:
        yield running


@contextmanager
def thread() -> Iterator[int]:
    """A thread of this process."""
    done = threading.Event()
    running = threading.Thread(target=done.wait)
    running.start()
    assert running.native_id is not None
    try:
        yield running.native_id
    finally:
        done.set()
        running.join()


async def test_memory_that_the_daemon_has_open_is_refused(daemon: Daemon) -> None:
    """It is what another trainer has handed over, to be told of by nobody else; a thread is as good as a process."""
    with memory() as (_, fd), ExitStack() as stack:
        for pid in (os.getpid(), stack.enter_context(child(fd)).pid, stack.enter_context(thread())):
            error = await refused(daemon, [await header(daemon), segment(f"/proc/{pid}/fd/{fd}"), END])
            assert (error.code(), field_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "segment.path")


async def test_memory_of_a_process_that_is_not_the_daemons_is_copied(daemon: Daemon) -> None:
    """The control."""
    with memory() as (_, fd), stranger(fd) as pid:
        response = await push(daemon, [await header(daemon), segment(f"/proc/{pid}/fd/{fd}"), END])
    assert response.applied.active_version == 1


async def test_a_pipe_that_the_daemon_has_open_is_not_told(daemon: Daemon) -> None:
    """Also where a trainer has it too, and names it as its own: it may have been inherited in either direction. vLLM
    waits for its children on pipes, and ends the engine when a byte comes."""
    with memory() as (_, fd), pipe() as (path, reading):
        writing = int(path.rpartition("/")[2])
        with stranger(fd, reading, writing) as pid:
            for end in (reading, writing):
                piece = segment(f"/proc/{pid}/fd/{fd}", taken_path=f"/proc/{pid}/fd/{end}")
                error = await refused(daemon, [await header(daemon), piece, END])
                assert field_of(error) == "segment.taken_path"
        os.set_blocking(reading, False)
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)


async def test_a_pipe_that_only_the_trainer_has_is_told(daemon: Daemon) -> None:
    """The control; the same pipe serves two streams."""
    with memory() as (_, fd):
        reading, writing = os.pipe()
        with stranger(fd, reading, writing) as pid:
            os.close(reading)
            os.close(writing)
            pieces = [segment(f"/proc/{pid}/fd/{fd}", taken_path=f"/proc/{pid}/fd/{writing}")] * 2
            for _ in range(2):
                assert (await push(daemon, [await header(daemon), *pieces, END])).push.received_bytes == 32
