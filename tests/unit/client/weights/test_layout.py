"""Where tensors lie, and whose they are."""

from dataclasses import replace

import pytest

from genserve.client.weights.layout import ByteSpace
from genserve.client.weights.modules import Share
from genserve.client.weights.sources import TensorSource
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range

LAYOUT = Manifest.end_to_end([("c", "U8", (4,), 4), ("a", "BF16", (2, 3), 12), ("b", "U8", (5,), 5)])
DATA = {"a": bytes(range(12)), "b": bytes(range(50, 55)), "c": bytes(range(90, 94))}
WHOLE = DATA["a"] + DATA["b"] + DATA["c"]


def source(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSource:
    """One with the bytes of DATA."""
    return TensorSource(name, dtype, shape, lambda: memoryview(DATA[name]))


SOURCES = [source(each.name, each.dtype, each.shape) for each in LAYOUT.tensors]


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


async def test_tensor_pieces_are_read_in_turn_and_sent_to_their_places() -> None:
    """As of a rank that has some columns: its bytes lie side by side here, and apart in the whole."""
    data = memoryview(b"abcdefghi")
    share = Share(((1, 3), (6, 10), (12, 15)), (0, 1), 0)
    space = ByteSpace([TensorSource("a", "U8", (20,), lambda: data, share), source("b", "U8", (5,))])
    assert space.ranges == [(1, 3), (6, 10), (12, 15), (20, 25)]
    assert space.total_bytes == 25
    expected = dict(zip([1, 2, 6, 7, 8, 9, 12, 13, 14, *range(20, 25)], bytes(data) + DATA["b"], strict=True))
    for chunk_bytes in (1, 3, 100):
        assert await sent(space, space.ranges, chunk_bytes) == expected


@pytest.mark.parametrize(
    ("ranges", "names"),
    [
        ([], ""),
        ([(0, 21)], "abc"),
        ([(11, 12)], "a"),
        ([(12, 13)], "b"),
        ([(0, 12), (17, 18)], "ac"),
        ([(11, 13)], "ab"),
        ([(0, 1), (2, 3), (16, 17)], "ab"),
        ([(20, 21)], "c"),
    ],
)
def test_the_tensors_that_have_bytes_in_ranges_are_named(ranges: list[Range], names: str) -> None:
    """Those that end where a range begins, or begin where it ends, have none."""
    assert ByteSpace(SOURCES).names(ranges) == list(names)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(("d", "U8", (1,)), r"\bd\b"), (("b", "U8", (6,)), r"\bb\b.*U8\[6\].*U8\[5\]")],
)
def test_tensor_that_is_not_of_the_layout_is_refused(tensor: tuple[str, str, tuple[int, ...]], message: str) -> None:
    """Here, and by its name, rather than by the daemon."""
    with pytest.raises(ValueError, match=message):
        ByteSpace([source(*tensor)], LAYOUT)


def test_a_layout_whose_shapes_are_lists_is_the_same() -> None:
    """As one that was sent to other ranks as JSON."""
    listed = replace(LAYOUT, tensors=tuple(replace(each, shape=list(each.shape)) for each in LAYOUT.tensors))
    assert ByteSpace(SOURCES, listed).total_bytes == ByteSpace(SOURCES, LAYOUT).total_bytes
