"""When memory is handed over instead of bytes."""

import asyncio
import os

from genserve.memory.ring import NUM_PIECES, Piece, SharedRing, SpareRings
from tests.support.patience import STEP_S, turns


def read(piece: Piece) -> bytes:
    """As a daemon does."""
    with open(piece.path, "rb") as memory:
        memory.seek(piece.start)
        return memory.read(piece.length)


def acknowledge(piece: Piece, num_pieces: int) -> None:
    """As a daemon does that has copied so many."""
    with open(piece.ack_path, "wb") as pipe:
        pipe.write(bytes(num_pieces))


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


async def test_memory_is_written_anew_when_its_copy_is_acknowledged() -> None:
    """Round and round, and not a byte before."""
    ring = SharedRing()
    pieces = [await ring.put([b"%d" % number]) for number in range(NUM_PIECES)]
    further = asyncio.create_task(ring.put([b"x"]))
    await turns()
    assert not further.done()
    assert [read(piece) for piece in pieces] == [b"%d" % number for number in range(NUM_PIECES)]
    acknowledge(pieces[0], 1)
    piece = await asyncio.wait_for(further, STEP_S)
    assert piece.start == pieces[0].start
    assert read(piece) == b"x"
    ring.close()


async def test_wait_for_room_in_the_ring_can_be_cancelled() -> None:
    """And the ring goes on where it was."""
    ring = SharedRing()
    pieces = [await ring.put([b"y"]) for _ in range(NUM_PIECES)]
    waiting = asyncio.create_task(ring.put([b"x"]))
    await turns()
    assert waiting.cancel(), "it has not waited"
    await asyncio.wait({waiting})
    acknowledge(pieces[0], NUM_PIECES)
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
