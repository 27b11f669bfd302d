"""Where tensors lie, whose they are, and how bytes are shared out among streams."""

import random

import pytest

from genserve.client.weights.layout import ByteSpace, Layout, Range, common, merged, split
from genserve.client.weights.sources import TensorSource

LAYOUT = Layout([("c", "U8", (4,)), ("a", "BF16", (2, 3)), ("b", "U8", (5,))])
DATA = {"a": bytes(range(12)), "b": bytes(range(50, 55)), "c": bytes(range(90, 94))}
WHOLE = DATA["a"] + DATA["b"] + DATA["c"]


def source(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSource:
    """One with the bytes of DATA."""
    return TensorSource(name, dtype, shape, lambda: memoryview(DATA[name]))


SOURCES = [source(*tensor) for tensor in LAYOUT.tensors]


async def sent(space: ByteSpace, ranges: list[Range], chunk_bytes: int) -> dict[int, int]:
    """Bytes by their offset."""
    found: dict[int, int] = {}
    async for offset, pieces in space.chunks(ranges, chunk_bytes):
        data = b"".join(pieces)
        assert 0 < len(data) <= chunk_bytes
        assert not found.keys() & set(range(offset, offset + len(data))), "sent twice"
        found |= {offset + i: byte for i, byte in enumerate(data)}
    return found


@pytest.mark.parametrize("chunk_bytes", [1, 3, 100])
async def test_parts_of_several_callers_make_the_whole(chunk_bytes: int) -> None:
    """Each knows the layout of all, and has some of the tensors."""
    found: dict[int, int] = {}
    for names in ("ac", "b"):
        space = ByteSpace([s for s in SOURCES if s.name in names], LAYOUT)
        assert space.total_bytes == len(WHOLE)
        assert space.manifest(partial=False) == ByteSpace(SOURCES).manifest(partial=False)
        found |= await sent(space, space.ranges, chunk_bytes)
    assert bytes(found[i] for i in range(len(WHOLE))) == WHOLE


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(("d", "U8", (1,)), "d is not in the layout"), (("b", "U8", (6,)), r"b is U8\[6\], the layout has U8\[5\]")],
)
def test_tensor_that_is_not_of_the_layout_is_refused(tensor: tuple[str, str, tuple[int, ...]], message: str) -> None:
    """Here, and by its name, rather than by the daemon."""
    with pytest.raises(ValueError, match=message):
        ByteSpace([source(*tensor)], LAYOUT)


def test_splitting_shares_every_byte_out_once() -> None:
    """In parts that differ by a byte at most, whatever the holes."""
    rng = random.Random(1)
    for _ in range(200):
        points = sorted(rng.sample(range(1000), 2 * rng.randint(0, 6)))
        ranges = list(zip(points[::2], points[1::2], strict=True))
        parts = split(ranges, num_parts := rng.randint(1, 7))
        every = sorted(byte for part in parts for start, end in part for byte in range(start, end))
        assert every == [byte for start, end in ranges for byte in range(start, end)]
        sizes = [sum(end - start for start, end in part) for part in parts]
        assert len(parts) == num_parts
        assert max(sizes) - min(sizes) <= 1


def test_ranges_in_common() -> None:
    """What a caller still has to send of what is missing."""
    assert common([(0, 5), (8, 20)], [(3, 9), (15, 16), (20, 30)]) == [(3, 5), (8, 9), (15, 16)]
    assert merged([(0, 2), (2, 4), (4, 4), (6, 7)]) == [(0, 4), (6, 7)]
