"""Staging: which chunks are taken, and what a refused one leaves behind."""

import asyncio
import contextlib
import gc
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.errors import ChecksumMismatchError, ChunkOutOfRangeError, PushConflictError, StagingFullError
from genserve.memory.arena import Arena
from genserve.tensors.manifest import Manifest, TensorSpec
from genserve.weights.push import staging as staging_module
from genserve.weights.push.staging import Staging, check_chunk
from tests.support.patience import STEP_S, turns
from tests.unit.weights.conftest import weights
from tests.unit.weights.push.staging import new_staging

DATA = weights(1)


@pytest.fixture
def staging() -> Iterator[Staging]:
    staging = new_staging()
    yield staging
    staging.close()


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), max_size=12), st.integers())
def test_chunks_in_any_order_and_overlap_make_the_bytes(cuts: list[tuple[int, int]], seed: int) -> None:
    """However the bytes are cut, doubled and shuffled, they come out as they are, once."""
    chunks = [(min(cut), max(cut) + 1) for cut in cuts] + [(0, 10), (10, 32)]
    random.Random(seed).shuffle(chunks)
    staging = new_staging()
    for start, end in chunks:
        staging.write(start, DATA[start:end], google_crc32c.value(DATA[start:end]))
    assert staging.has_every_byte
    assert bytes(staging.arena.view(0, 32)) == DATA
    assert staging.counted.total == 32
    staging.close()


def test_report_tells_what_is_missing(staging: Staging) -> None:
    """Where to resume, and how much is there."""
    staging.write(4, DATA[4:8], None)
    staging.write(20, DATA[20:32], None)
    assert staging.missing == ((0, 4), (8, 20))
    assert staging.counted.total == 16


def test_flipped_bit_is_refused_by_name(staging: Staging) -> None:
    """The error has the offset and the tensor; the chunk is not staged and can be sent again."""
    with pytest.raises(ChecksumMismatchError) as error:
        staging.write(18, DATA[18:20], google_crc32c.value(DATA[18:20]) ^ 1)
    assert error.value.metadata == {"offset": "18", "tensor": "b"}
    assert staging.counted.total == 0
    staging.write(18, DATA[18:20], google_crc32c.value(DATA[18:20]))
    assert staging.counted.total == 2


def test_checksum_zero_is_a_checksum(staging: Staging) -> None:
    """`crc32c` 0 is checked, only None is not."""
    with pytest.raises(ChecksumMismatchError):
        staging.write(0, DATA, 0)
    staging.write(0, DATA, None)
    assert staging.has_every_byte


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (31, 2), (32, 1), (2**63, 1)])
def test_chunk_outside_is_refused(staging: Staging, offset: int, length: int) -> None:
    """Not one byte of it is taken."""
    with pytest.raises(ChunkOutOfRangeError) as error:
        staging.write(offset, b"x" * length, None)
    assert error.value.metadata == {"offset": str(offset), "total_bytes": "32"}
    assert staging.counted.total == 0


def test_other_bytes_than_before_are_a_conflict(staging: Staging) -> None:
    """Two trainers with the same push id, or a trainer that went on training: nothing of the chunk is written."""
    staging.write(8, DATA[8:16], None)
    before = bytes(staging.arena.view(0, 32))
    chunk = DATA[4:15] + b"\xff" + DATA[16:20]
    with pytest.raises(PushConflictError) as error:
        staging.write(4, chunk, None)
    assert error.value.metadata == {"push_id": "p1", "offset": "8"}
    assert bytes(staging.arena.view(0, 32)) == before
    assert staging.counted.total == 8
    staging.write(4, DATA[4:20], None)
    assert staging.counted.total == 16


def test_chunks_full_of_holes_are_refused_at_last(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bookkeeping stays bounded whatever is sent."""
    monkeypatch.setattr(staging_module, "MAX_RANGES", 3)
    for offset in (0, 2, 4):
        staging.write(offset, DATA[offset : offset + 1], None)
    with pytest.raises(StagingFullError):
        staging.write(6, DATA[6:7], None)


def test_bytes_of_an_earlier_attempt_count_once_they_compare_equal(staging: Staging) -> None:
    """They are there, so nobody writes them again; other bytes are a conflict."""
    assert staging.write(0, DATA[:20], None) == 20
    staging.begin_anew()
    assert (staging.counted.total, staging.missing) == (0, ((0, 32),))
    assert staging.claim(16, 8) is None, "some of it is there: to be compared"
    with pytest.raises(PushConflictError):
        staging.write(10, DATA[10:15] + b"\xff", None)
    assert staging.counted.total == 0
    assert staging.write(10, DATA[10:30], None) == 20
    assert staging.missing == ((0, 10), (30, 32))
    assert staging.write(0, DATA, None) == 12
    assert staging.has_every_byte


def test_bytes_that_an_earlier_attempt_wrote_elsewhere_do_not_count(staging: Staging) -> None:
    """A thread was still copying them when the next attempt began: they are there, to be compared."""
    claim = staging.claim(0, 32)
    assert claim is not None
    staging.begin_anew()
    claim.target[:] = DATA
    assert staging.settle(claim, written=True) == 0
    assert staging.counted.total == 0
    with pytest.raises(PushConflictError):
        staging.write(0, bytes(32), None)


@pytest.mark.parametrize(("offset", "tensor"), [(0, "a"), (3, "a"), (4, "b"), (7, "b"), (8, "")])
def test_a_damaged_chunk_names_the_tensor_it_is_for(offset: int, tensor: str) -> None:
    """One without bytes is at the first byte of another one, and owns none. What no tensor needs has no name."""
    specs = (TensorSpec("a", "U8", (4,), 0, 4), TensorSpec("b", "U8", (4,), 4, 4), TensorSpec("c", "U8", (0,), 4, 0))
    with pytest.raises(ChecksumMismatchError) as damaged:
        check_chunk(offset, b"x", 0, 9, specs)
    assert damaged.value.metadata["tensor"] == tensor


def test_a_chunk_has_its_checksum_or_none() -> None:
    """0 is one, too. What was applied has no tensors to name any more."""
    check_chunk(0, b"x", None, 1)
    check_chunk(0, b"", 0, 1)
    with pytest.raises(ChecksumMismatchError) as damaged:
        check_chunk(0, b"x", 0, 1)
    assert "tensor" not in damaged.value.metadata


def test_the_checksum_of_the_first_chunk_is_a_part_of_receiving(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push may have no other one."""
    times = iter([0.0, 5.0, 6.0, 7.0])  # the checksum takes 5 s
    monkeypatch.setattr(staging_module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    staging.write(0, DATA, google_crc32c.value(DATA))
    assert staging.verify_s == 5.0 < staging.receive_s


def test_checksum_of_claimed_bytes_counts_only_for_the_present_attempt(staging: Staging) -> None:
    """Threads compute it, and may be at it when another attempt begins."""
    claims = [staging.claim(0, 8), staging.claim(8, 8)]
    assert claims[0] is not None and claims[1] is not None
    staging.settle(claims[0], written=True, verify_s=3.0)
    assert staging.verify_s == 3.0
    staging.begin_anew()
    staging.settle(claims[1], written=True, verify_s=3.0)
    assert staging.verify_s == 0.0


def test_the_times_are_those_of_the_present_attempt(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receiving lasts from its first byte to its last; checking is a part of it. Here the clock ticks once a look."""
    ticks = iter(range(1000))
    monkeypatch.setattr(staging_module, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    assert (staging.receive_s, staging.verify_s) == (0.0, 0.0)
    staging.write(0, DATA[:8], None)  # looks when it begins and when it is there
    staging.write(8, DATA[8:16], google_crc32c.value(DATA[8:16]))  # twice more for its checksum
    assert (staging.receive_s, staging.verify_s) == (4.0, 1.0)
    staging.begin_anew()
    assert (staging.receive_s, staging.verify_s) == (0.0, 0.0)
    staging.write(0, DATA[:8], None)
    assert (staging.receive_s, staging.verify_s) == (1.0, 0.0)


def test_an_empty_chunk_is_no_byte(staging: Staging) -> None:
    """It may lie at the end; no attempt begins with it."""
    assert staging.write(32, b"", None) == 0
    assert staging.claim(32, 0) is None
    assert staging.receive_s == 0.0
    with pytest.raises(ChunkOutOfRangeError):
        staging.claim(33, 0)


def test_a_place_that_is_written_elsewhere_is_one_range_more(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room where a chunk has."""
    monkeypatch.setattr(staging_module, "MAX_RANGES", 3)
    for offset in (0, 2):
        staging.write(offset, DATA[offset : offset + 1], None)
    claim = staging.claim(4, 1)
    assert claim is not None
    claim.target[:] = DATA[4:5]
    staging.settle(claim, written=True)
    with pytest.raises(StagingFullError):
        staging.claim(6, 1)


@pytest.mark.parametrize(
    ("specs", "data", "differing"),
    [
        ({"embed": ("U8", 4), "head": ("U8", 4)}, b"aaaaaaaa", []),
        ({"embed": ("U8", 4), "head": ("U8", 4)}, b"aaaabbbb", ["head"]),
        ({"head": ("U8", 4)}, b"aaaa", []),
        ({"embed": ("U8", 4)}, b"aaaa", []),
        ({"embed": ("U8", 4), "head": ("I8", 4)}, b"aaaabbbb", []),
        ({"embed": ("U8", 4), "head": ("U8", 2)}, b"aaaabb", []),
        ({"embed": ("U8", 2), "other": ("U8", 2), "spare": ("U8", 2)}, b"aabbcc", ["other", "spare"]),
        ({"embed": ("U8", 2), "other": ("I8", 2), "spare": ("U8", 2)}, b"aabbcc", ["spare"]),
    ],
)
def test_tied_tensors_of_one_kind_have_the_same_bytes(
    specs: dict[str, tuple[str, int]], data: bytes, differing: list[str]
) -> None:
    """Those that differ are named, each of them. Bytes of another type or shape are not compared: a cast may be the
    same value. A tensor that comes without the one that it is tied to has nothing to differ from."""
    manifest = Manifest.end_to_end((name, dtype, (size,), size) for name, (dtype, size) in specs.items())
    staging = Staging("p1", manifest, Arena.allocate(len(data)))
    staging.write(0, data, None)
    issues = staging.tied_issues({"head": "embed", "other": "embed", "spare": "embed"})
    assert [issue.tensor for issue in issues] == differing
    assert all("'embed'" in issue.description for issue in issues)
    staging.close()


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
    assert push.claims == {claim}
    push.settle(claim, written=False)
    assert push.counted.total == 0
    again = push.claim(0, total)
    assert again is not None
    push.settle(again, written=True)
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
    for offset, length in ((0, 3), (5, 4)):
        with pytest.raises(ValueError, match="claimed"):
            push.claim(offset, length)
    with pytest.raises(ChunkOutOfRangeError):
        push.claim(push.manifest.total_bytes, 1)
    push.settle(claim, written=True)
    push.close()


async def test_waiting_ends_when_nobody_writes_to_the_place_any_more() -> None:
    """Whether it was written or not."""
    push = new_staging()
    for offset in (0, 6):  # next to the claim
        await asyncio.wait_for(push.wait_unclaimed(offset, 2), STEP_S)
    claims = [push.claim(2, 2), push.claim(4, 2)]
    waiting = asyncio.create_task(push.wait_unclaimed(0, 6))
    for written, claim in enumerate(claims):
        await turns()
        assert not waiting.done()
        assert claim is not None
        push.settle(claim, written=bool(written))
    await asyncio.wait_for(waiting, STEP_S)
    push.close()


def test_memory_outlives_a_push_that_times_out_while_it_is_written() -> None:
    """The thread has a view, which keeps it."""
    push = new_staging()
    claim = push.claim(0, 4)
    assert claim is not None
    push.close()
    claim.target[:] = b"late"
    push.settle(claim, written=True)
