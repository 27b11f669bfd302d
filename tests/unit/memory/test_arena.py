"""The arena: real memory files, and real processes that map them."""

import asyncio
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genserve.errors import StagingFullError
from genserve.memory import available
from genserve.memory.arena import Arena, allocate_arena, map_arena
from tests.support.patience import STEP_S, until
from tests.support.refusals import refuses

MAP_AND_PRINT = """
import sys
from genserve.memory.arena import map_arena
mapped = map_arena(sys.argv[1], int(sys.argv[2]))
print(mapped[4:9].decode(), flush=True)
sys.stdin.read(1)  # until the test has closed the arena
print(mapped[4:9].decode(), "numpy" in sys.modules)
"""


def test_worker_process_maps_what_was_written() -> None:
    """Through the path alone, without numpy, and for as long as it likes: closing the arena takes nothing away."""
    arena = Arena.allocate(10_000)
    arena.write(4, b"hello")
    command = [sys.executable, "-c", MAP_AND_PRINT, arena.path, str(arena.size_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "hello\n"
        arena.close()
        rest, _ = worker.communicate("x", timeout=30)
    assert rest == "hello False\n"


ALLOCATE_AND_WAIT = """
import sys
from genserve.memory.arena import Arena
arena = Arena.allocate(1 << 20)
print(arena.path, flush=True)
sys.stdin.read(1)
"""


def test_killed_owner_leaves_nothing_behind() -> None:
    """SIGKILL runs no cleanup, and none is needed: no name in /dev/shm, and the path is gone with the process."""
    with subprocess.Popen(
        [sys.executable, "-c", ALLOCATE_AND_WAIT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        path = owner.stdout.readline().strip()
        mapped = map_arena(path, 1 << 20)
        held = os.stat(path)
        assert (held.st_dev, held.st_ino) not in {_identity(each) for each in os.scandir("/dev/shm")}
        owner.send_signal(signal.SIGKILL)
        owner.wait(timeout=30)
    with pytest.raises(OSError, match="No such file"):
        map_arena(path, 1 << 20)
    assert mapped[:4] == b"\0\0\0\0"  # what is mapped stays


def test_map_is_read_only() -> None:
    """A worker cannot change bytes that were verified."""
    arena = Arena.allocate(64)
    mapped = map_arena(arena.path, 64)
    with pytest.raises(TypeError):
        mapped[0] = 1
    arena.close()


def test_arena_is_private_to_its_user() -> None:
    """Mode 0600, and not inherited by processes that are started."""
    arena = Arena.allocate(64)
    fd = int(arena.path.rpartition("/")[2])
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(fd)
    arena.close()


def test_bytes_go_where_they_belong_and_nowhere_else() -> None:
    """Writing outside is refused, also where a slice of Python would be silently cut."""
    arena = Arena.allocate(8)
    arena.write(3, b"abc")
    assert bytes(arena.view(0, 8)) == b"\0\0\0abc\0\0"
    assert arena.equals(3, b"abc")
    assert not arena.equals(3, b"abd")
    for offset, data in ((6, b"abc"), (-1, b"a"), (9, b"")):
        with pytest.raises(ValueError, match="outside"):
            arena.write(offset, data)
    assert bytes(arena.view(0, 8)) == b"\0\0\0abc\0\0"
    arena.close()


def test_empty_arena_can_be_used_and_mapped() -> None:
    """A push of tensors without elements needs no special case."""
    arena = Arena.allocate(0)
    arena.write(0, b"")
    assert bytes(arena.view(0, 0)) == b""
    assert isinstance(map_arena(arena.path, 0), mmap.mmap)
    arena.close()


def test_closing_gives_the_memory_back() -> None:
    """File descriptor and mapping are gone, at once and without the collector of cycles; twice is once."""
    gc.disable()
    try:
        before = _num_maps()
        arena = Arena.allocate(1 << 20)
        fd = int(arena.path.rpartition("/")[2])
        view = arena.view(0, 1)
        assert _num_maps() == before + 1
        del view
        assert _num_maps() == before, "nothing is mapped without need"
        arena.close()
        arena.close()
        assert _num_maps() == before
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="closed"):
        arena.write(0, b"x")


def test_view_outlives_the_arena() -> None:
    """A view that is still used keeps the memory: it can never point to nothing."""
    arena = Arena.allocate(8)
    arena.write(0, b"abc")
    view, target = arena.view(0, 3), arena.target(0, 2)
    arena.close()
    target[:] = b"de"  # by a thread that nobody waited for
    assert bytes(view) == b"dec"


def test_a_window_maps_no_more_than_its_bytes() -> None:
    """Whatever others view: with one map for all, everything that was read would stay mapped until the last one ends.
    It keeps the memory, as a view does."""
    size_bytes, piece_bytes = 64 << 20, 1 << 20
    arena = Arena.allocate(size_bytes - 1)
    arena.write(size_bytes - 6, b"bytes")
    arena.extend(size_bytes)  # what was mapped to be written is not mapped any more
    viewed, before_bytes, most_bytes = arena.view(0, 1), _mapped_bytes(), 0
    for offset in range(0, size_bytes, piece_bytes):
        assert bytes(arena.window(offset, piece_bytes)[:: mmap.PAGESIZE]) == bytes(piece_bytes // mmap.PAGESIZE)
        most_bytes = max(most_bytes, _mapped_bytes())
    assert most_bytes - before_bytes < size_bytes // 4
    assert arena.window(0, 0) == b""
    with pytest.raises(ValueError, match="outside"):
        arena.window(size_bytes - 4, 5)
    last = arena.window(size_bytes - 6, 5)
    arena.close()
    assert (last, viewed) == (b"bytes", b"\0")


def _mapped_bytes() -> int:
    """Pages of memory files that this process has in its page tables."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem"))


@pytest.mark.parametrize(
    "use", [lambda arena: arena.view(0, 5), lambda arena: arena.window(0, 5), lambda arena: arena.target(0, 5)]
)
def test_an_arena_that_is_closed_while_it_is_mapped_is_mapped_whole(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[Arena], memoryview]
) -> None:
    """Without its descriptor the map would be of nothing, or of the file that has got the number."""
    arena, map_file = Arena.allocate(5), mmap.mmap
    arena.write(0, b"bytes")
    arena.extend(6)  # nothing is mapped
    closing = threading.Thread(target=arena.close)

    def map_late(fd: int, *args: Any, **fields: Any) -> mmap.mmap:
        closing.start()
        closing.join(0.05)
        return map_file(fd, *args, **fields)

    monkeypatch.setattr(mmap, "mmap", map_late)
    assert use(arena) == b"bytes"
    closing.join(30)
    with pytest.raises(ValueError, match="closed"):
        use(arena)


def test_more_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the header and as an error, not as a SIGBUS when the bytes arrive; a margin is left to others."""
    with pytest.raises(StagingFullError):
        Arena.allocate(1 << 50)
    monkeypatch.setattr(available, "available_memory_bytes", lambda: available.MARGIN_BYTES + 99)
    Arena.allocate(99).close()
    with pytest.raises(StagingFullError):
        Arena.allocate(100)


def test_failed_reservation_is_an_error_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernel refuses although there seemed to be room."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = _open_fds()
    with refuses(StagingFullError, says="No space left"):
        Arena.allocate(1 << 20)
    assert _open_fds() <= before


def test_memory_that_cannot_be_made_private_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system is one of room, and leaks nothing either."""

    def refuse(fd: int, mode: int) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    before = _open_fds()
    with refuses(StagingFullError, says="not permitted"):
        Arena.allocate(1 << 20)
    assert _open_fds() <= before


def test_a_map_is_all_that_maps_keep(request: pytest.FixtureRequest) -> None:
    """A worker maps an arena for each version: descriptors beside the maps would run out."""
    arena = Arena.allocate(4096)
    request.addfinalizer(arena.close)
    before = _open_fds()
    for _ in range(3):
        map_arena(arena.path, 4096).close()
    with pytest.raises(ValueError, match="size"):
        map_arena(arena.path, 1 << 20)
    assert _open_fds() <= before


async def test_cancelled_allocation_gives_back_what_the_thread_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that goes away while its memory is reserved does not leak it."""
    begun, go_on, closed = threading.Event(), threading.Event(), asyncio.Event()

    def allocate_slowly(size_bytes: int) -> Arena:
        begun.set()
        go_on.wait(STEP_S)
        return original(size_bytes)

    def close(arena: Arena) -> None:
        free(arena)
        closed.set()

    original, free = Arena.allocate, Arena.close
    monkeypatch.setattr(Arena, "allocate", allocate_slowly)
    monkeypatch.setattr(Arena, "close", close)
    allocating = asyncio.create_task(allocate_arena(64))
    await until(begun.is_set)
    allocating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await allocating
    go_on.set()
    await asyncio.wait_for(closed.wait(), STEP_S)


def _identity(entry: "os.DirEntry[str]") -> tuple[int, int]:
    """Which file it is, if it is still there: other tests share memory meanwhile."""
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return 0, 0
    return found.st_dev, found.st_ino


def _num_maps() -> int:
    return sum("genserve-arena" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))
