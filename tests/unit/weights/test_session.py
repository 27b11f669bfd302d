"""Staging: which chunks are taken, and what a refused one leaves behind."""

import random
from collections.abc import Iterator

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.errors import ChecksumMismatchError, ChunkOutOfRangeError, PushConflictError, StagingFullError
from genserve.weights import session as session_module
from genserve.weights.arena import Arena
from genserve.weights.push import PushState
from genserve.weights.session import PushSession
from tests.unit.weights.conftest import MANIFEST, header, weights

DATA = weights(1)


def new_session(clock: list[float] | None = None) -> PushSession:
    arena = Arena.allocate(MANIFEST.total_bytes)
    return PushSession("p1", header(), MANIFEST, MANIFEST.digest, arena, lambda: clock[0] if clock else 0.0)


@pytest.fixture
def session() -> Iterator[PushSession]:
    session = new_session()
    yield session
    session.close()


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), max_size=12), st.integers())
def test_chunks_in_any_order_and_overlap_make_the_bytes(cuts: list[tuple[int, int]], seed: int) -> None:
    """However the bytes are cut, doubled and shuffled, they come out as they are, once."""
    chunks = [(min(cut), max(cut) + 1) for cut in cuts] + [(0, 10), (10, 32)]
    random.Random(seed).shuffle(chunks)
    session = new_session()
    for start, end in chunks:
        session.write(start, DATA[start:end], google_crc32c.value(DATA[start:end]))
    assert session.is_complete
    assert bytes(session.arena.view(0, 32)) == DATA
    assert session.report().received_bytes == 32
    session.close()


def test_report_tells_what_is_missing(session: PushSession) -> None:
    """Where to resume, and how much is there."""
    session.write(4, DATA[4:8], None)
    session.write(20, DATA[20:32], None)
    report = session.report()
    assert report.missing == ((0, 4), (8, 20))
    assert (report.received_bytes, report.total_bytes, session.missing_bytes) == (16, 32, 16)
    assert (report.state, report.manifest_digest) == (PushState.RECEIVING, MANIFEST.digest)


def test_flipped_bit_is_refused_by_name(session: PushSession) -> None:
    """The error has the offset and the tensor; the chunk is not staged and can be sent again."""
    with pytest.raises(ChecksumMismatchError) as error:
        session.write(18, DATA[18:20], google_crc32c.value(DATA[18:20]) ^ 1)
    assert error.value.metadata == {"offset": "18", "tensor": "b"}
    assert session.report().received_bytes == 0
    session.write(18, DATA[18:20], google_crc32c.value(DATA[18:20]))
    assert session.report().received_bytes == 2


def test_checksum_zero_is_a_checksum(session: PushSession) -> None:
    """`crc32c` 0 is checked, only None is not."""
    with pytest.raises(ChecksumMismatchError):
        session.write(0, DATA, 0)
    session.write(0, DATA, None)
    assert session.is_complete


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (31, 2), (32, 1), (2**63, 1)])
def test_chunk_outside_is_refused(session: PushSession, offset: int, length: int) -> None:
    """Not one byte of it is taken."""
    with pytest.raises(ChunkOutOfRangeError):
        session.write(offset, b"x" * length, None)
    assert session.report().received_bytes == 0


def test_other_bytes_than_before_are_a_conflict(session: PushSession) -> None:
    """Two trainers with the same push id, or a trainer that went on training: nothing of the chunk is written."""
    session.write(8, DATA[8:16], None)
    before = bytes(session.arena.view(0, 32))
    chunk = DATA[4:15] + b"\xff" + DATA[16:20]
    with pytest.raises(PushConflictError):
        session.write(4, chunk, None)
    assert bytes(session.arena.view(0, 32)) == before
    assert session.report().received_bytes == 8
    session.write(4, DATA[4:20], None)
    assert session.report().received_bytes == 16


def test_chunks_full_of_holes_are_refused_at_last(session: PushSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bookkeeping stays bounded whatever is sent."""
    monkeypatch.setattr(session_module, "_MAX_RANGES", 3)
    for offset in (0, 2, 4):
        session.write(offset, DATA[offset : offset + 1], None)
    with pytest.raises(StagingFullError):
        session.write(6, DATA[6:7], None)


def test_every_chunk_begins_the_time_to_live_anew() -> None:
    """A repeat counts as well: somebody is there."""
    clock = [100.0]
    session = new_session(clock)
    assert session.idle_until_s == 400.0
    clock[0] = 150.0
    session.write(0, DATA[:4], None)
    clock[0] = 160.0
    session.write(0, DATA[:4], None)
    assert session.idle_until_s == 460.0
    session.close()


def test_tensors_are_staged_where_the_manifest_says(session: PushSession) -> None:
    """Errors name the tensor that a byte belongs to."""
    assert [session.tensor_at(offset) for offset in (0, 15, 16, 31, 32)] == ["a", "a", "b", "b", ""]


def test_repeat_after_the_bytes_are_served_is_ignored(session: PushSession) -> None:
    """Applied meanwhile: a slow stream that still sends what others have sent does no harm, nor does it get one."""
    session.write(0, DATA, None)
    session.is_served = True
    session.arena.close()
    session.write(0, DATA[:4], google_crc32c.value(DATA[:4]))
    with pytest.raises(ChunkOutOfRangeError):
        session.write(31, b"xx", None)
