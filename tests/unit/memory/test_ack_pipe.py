"""The pipe on which a trainer is told what was copied: written to only if it was made for this."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from genserve.errors import InvalidFieldError
from genserve.memory.ack_pipe import AckPipe
from genserve.memory.daemon_processes import DaemonProcesses
from tests.support.descriptor_holders import child, stranger
from tests.support.idle_process import idle_process
from tests.support.refusals import refuses

OWN = f"/proc/{os.getpid()}/fd"
MEMORY = f"{OWN}/0"
"""Where a trainer's memory is said to be: in this process. Only the process counts."""


@dataclass
class Pipe:
    """A trainer's, in this process."""

    reading: int
    writing: int

    @property
    def path(self) -> str:
        """As a trainer names it."""
        return f"{OWN}/{self.writing}"


@contextmanager
def new_pipe() -> Iterator[Pipe]:
    """One that nobody has but this process."""
    reading, writing = os.pipe()
    pipe = Pipe(reading, writing)
    try:
        yield pipe
    finally:
        os.close(pipe.reading)
        os.close(pipe.writing)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with new_pipe() as made:
        yield made


@pytest.fixture
def daemon() -> DaemonProcesses:
    """A daemon that has nothing open here."""
    return DaemonProcesses(idle_process().pid)


async def refused(path: str, memory_path: str, daemon: DaemonProcesses | None) -> str:
    """Why a pipe is not opened; nothing stays open."""
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidFieldError) as caught:
        await AckPipe.open(path, memory_path, daemon)
    (violation,) = caught.value.violations
    assert violation.field == "segment.taken_path"
    assert set(os.listdir("/proc/self/fd")) <= before  # what other tests have left may be closed meanwhile
    return violation.description


async def test_each_piece_is_one_byte(pipe: Pipe, daemon: DaemonProcesses) -> None:
    """Whoever reads it counts them."""
    opened = await AckPipe.open(pipe.path, MEMORY, daemon)
    opened.acknowledge()
    opened.acknowledge()
    assert os.read(pipe.reading, 9) == b"\0\0"
    opened.close()


async def test_a_pipe_that_is_full_or_read_by_nobody_is_an_error(pipe: Pipe, daemon: DaemonProcesses) -> None:
    """It waits for nobody."""
    opened = await AckPipe.open(pipe.path, MEMORY, daemon)
    os.write(pipe.writing, bytes(fcntl.fcntl(pipe.writing, fcntl.F_GETPIPE_SZ)))
    with refuses(InvalidFieldError, field="segment.taken_path"):
        opened.acknowledge()
    opened.close()
    with new_pipe() as other:
        opened = await AckPipe.open(other.path, MEMORY, daemon)
        os.close(other.reading)
        with refuses(InvalidFieldError, field="segment.taken_path", says="Broken pipe"):
            opened.acknowledge()
        opened.close()
        other.reading = os.dup(other.writing)  # for new_pipe to close


async def test_a_number_that_is_another_pipe_now_is_not_the_same_place(daemon: DaemonProcesses) -> None:
    """A trainer that closes one gets its number again for the next."""
    with new_pipe() as pipe, new_pipe() as other:
        opened = await AckPipe.open(pipe.path, MEMORY, daemon)
        assert opened.is_at(pipe.path)
        assert not opened.is_at(other.path)
        os.dup2(other.writing, pipe.writing)
        assert not opened.is_at(pipe.path)
        opened.close()
    assert not opened.is_at(pipe.path)


@pytest.mark.parametrize(
    "path", ["", "/dev/null", "/proc/self/fd/1", "/proc/0/fd/1", "OWN/1/", "OWN/-1", f"OWN/{'1' * 10}"]
)
async def test_only_a_descriptor_of_a_process_is_named(path: str, daemon: DaemonProcesses) -> None:
    """By its numbers: "self" would be the daemon."""
    assert "/proc/PID/fd/FD" in await refused(path.replace("OWN", OWN), MEMORY, daemon)


async def test_it_belongs_to_the_process_that_owns_the_memory(pipe: Pipe, daemon: DaemonProcesses) -> None:
    """Nobody makes the daemon write to another one's pipe."""
    assert "/proc/1/fd/3" in await refused(pipe.path, "/proc/1/fd/3", daemon)


async def test_only_a_pipe_of_this_user_is_opened(pipe: Pipe, daemon: DaemonProcesses, tmp_path: Path) -> None:
    """What a path leads to is looked at before it is opened."""
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    assert "not a pipe" in await refused(f"{OWN}/{file}", MEMORY, daemon)
    os.close(file)
    assert "No such file" in await refused(f"{OWN}/{file}", MEMORY, daemon)
    if os.geteuid() == 0:
        os.fchown(pipe.writing, 65534, 65534)
        assert "user" in await refused(pipe.path, MEMORY, daemon)


async def test_a_process_of_the_daemons_names_no_pipe(pipe: Pipe) -> None:
    """A trainer could name the daemon's own standard output."""
    assert (await refused(pipe.path, MEMORY, DaemonProcesses())).startswith("belongs to")


async def test_a_pipe_that_the_daemon_has_open_is_not_written_to(pipe: Pipe) -> None:
    """Whoever names it. vLLM's own pipes end the engine when a byte comes."""
    with child(pipe.reading) as process:
        why = await refused(pipe.path, MEMORY, DaemonProcesses(process.pid))
    assert "also open" in why


async def test_without_a_daemon_to_guard_a_pipe_may_be_its_own(pipe: Pipe) -> None:
    """A relay is a process of the daemon's, and so is its pipe."""
    opened = await AckPipe.open(pipe.path, MEMORY, None)
    opened.acknowledge()
    assert os.read(pipe.reading, 9) == b"\0"
    opened.close()


async def test_streams_may_share_a_pipe() -> None:
    """That one of them has it open does not make it the daemon's own. A descriptor that gets the number of a closed one
    does."""
    reading, writing = os.pipe()
    with stranger(reading, writing) as pid:
        os.close(reading)
        os.close(writing)
        path, memory_path = f"/proc/{pid}/fd/{writing}", f"/proc/{pid}/fd/{reading}"
        first = await AckPipe.open(path, memory_path, DaemonProcesses())
        second = await AckPipe.open(path, memory_path, DaemonProcesses())
        first.close()
        second.close()
        inherited = [os.open(path, os.O_WRONLY) for _ in range(2)]
        why = await refused(path, memory_path, DaemonProcesses())
        for fd in inherited:
            os.close(fd)
    assert "also open" in why
