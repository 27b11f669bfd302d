"""When memory is handed over instead of bytes."""

import asyncio
import os

import pytest

from genserve.memory.host import host_id
from genserve.memory.ring import NUM_PIECES, Piece, SharedRing, SpareRings, can_share, is_local


@pytest.mark.parametrize(
    ("target", "local"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("dns:///localhost:1", True),
        ("unix:/run/genserve", True),
        ("10.0.0.1:1", False),
        ("trainer-127.example:1", False),
        ("dns:///replica:1", False),
    ],
)
def test_targets_on_this_host(target: str, local: bool) -> None:
    """By name; whether the daemon is there too is told by its host_id."""
    assert is_local(target) is local
    assert can_share(target, host_id()) is local
    assert not can_share(target, "")
    assert not can_share(target, "another host")


def read(piece: Piece) -> bytes:
    """As a daemon does."""
    with open(piece.path, "rb") as memory:
        memory.seek(piece.start)
        return memory.read(piece.length)


def tell(piece: Piece, num_pieces: int) -> None:
    """As a daemon does that has copied so many."""
    with open(piece.ack_path, "wb") as taken:
        taken.write(bytes(num_pieces))


def is_there(path: str) -> bool:
    """Whether it can be opened."""
    return os.path.exists(path)


async def test_a_piece_names_where_was_written() -> None:
    """Any process of this user can read it there."""
    ring = SharedRing()
    piece = await ring.put([b"abc", memoryview(b"defg")])
    assert read(piece) == b"abcdefg"
    ring.close()
    ring.close()
    assert not is_there(piece.path)
    assert not is_there(piece.ack_path)


async def test_memory_is_written_anew_when_it_has_been_taken() -> None:
    """Round and round, and not a byte before."""
    ring = SharedRing()
    pieces = [await ring.put([b"%d" % number]) for number in range(NUM_PIECES)]
    further = asyncio.create_task(ring.put([b"x"]))
    await asyncio.sleep(0.01)
    assert not further.done()
    assert [read(piece) for piece in pieces] == [b"%d" % number for number in range(NUM_PIECES)]
    tell(pieces[0], 1)
    piece = await asyncio.wait_for(further, 1)
    assert piece.start == pieces[0].start
    assert read(piece) == b"x"
    ring.close()


async def test_whoever_waits_for_memory_can_be_cancelled() -> None:
    """And the ring goes on where it was."""
    ring = SharedRing()
    pieces = [await ring.put([b"y"]) for _ in range(NUM_PIECES)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ring.put([b"x"]), 0.01)
    tell(pieces[0], NUM_PIECES)
    assert read(await ring.put([b"z"])) == b"z"
    ring.close()


def test_memory_is_kept_for_the_next_push() -> None:
    """For one stream at a time."""
    spare = SpareRings()
    first, second = spare.take(), spare.take()
    assert first is not second
    spare.give_back(first)
    assert spare.take() is first
    spare.give_back(second)
    spare.close()
    assert spare.take() is not second
    first.close()
