"""Places that are written elsewhere than on the event loop."""

import asyncio
import contextlib
import gc
import os

import pytest

from genserve.errors import ChunkOutOfRangeError
from tests.support.patience import STEP_S, turns
from tests.unit.weights.push.staging import new_staging


def num_descriptors(memory: tuple[int, int]) -> int:
    """How many descriptors of this process, those that mappings keep included, are of one memory file. Descriptors of
    other things come and go with what earlier tests have left."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            file = os.stat(f"/proc/self/fd/{fd}")
            found += (file.st_dev, file.st_ino) == memory
    return found


def test_claimed_bytes_count_when_they_are_written() -> None:
    """Half of a push is never taken for all of it."""
    push = new_staging()
    file = os.stat(push.arena.path)
    memory = (file.st_dev, file.st_ino)
    total = push.manifest.total_bytes
    claim = push.claim(0, total)
    assert claim is not None
    claim.target[:] = b"x" * total
    assert not push.has_every_byte
    assert push.claims.overlap(total - 1, total)
    push.settle(claim, written=False, counts=True)
    assert push.num_counted == 0
    again = push.claim(0, total)
    assert again is not None
    push.settle(again, written=True, counts=True)
    assert push.has_every_byte
    assert push.claim(0, 1) is None, "it is there: to be compared"
    assert num_descriptors(memory) > 0
    push.close()
    del claim, again
    gc.collect()
    assert num_descriptors(memory) == 0


def test_places_that_are_claimed_are_not_claimed_twice() -> None:
    """Whoever comes second waits."""
    push = new_staging()
    claim = push.claim(2, 4)
    assert claim is not None
    assert [push.claims.overlap(0, 2), push.claims.overlap(6, 9), push.claims.overlap(5, 9)] == [False, False, True]
    with pytest.raises(ValueError, match="claimed"):
        push.claim(0, 3)
    with pytest.raises(ChunkOutOfRangeError):
        push.claim(push.manifest.total_bytes, 1)
    push.settle(claim, written=True, counts=True)
    push.close()


async def test_waiting_ends_with_the_next_that_is_settled() -> None:
    """Written or not."""
    push = new_staging()
    claim = push.claim(0, 4)
    assert claim is not None
    waiting = asyncio.create_task(push.claims.wait_settled())
    await turns()
    assert not waiting.done()
    push.settle(claim, written=False, counts=True)
    await asyncio.wait_for(waiting, STEP_S)
    push.close()


def test_memory_outlives_a_push_that_times_out_while_it_is_written() -> None:
    """The thread has a view, which keeps it."""
    push = new_staging()
    claim = push.claim(0, 4)
    assert claim is not None
    push.close()
    claim.target[:] = b"late"
    push.settle(claim, written=True, counts=True)
