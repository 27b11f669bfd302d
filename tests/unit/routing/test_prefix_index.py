"""What the index remembers, and what it forgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.routing.policies.prefix_index import Match, PrefixIndex
from tests.support.kept import kept
from tests.unit.routing.fleets import UNTIMED

PATHS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(lambda path: blocks("".join(path)))


def blocks(path: str) -> list[bytes]:
    """The hashes of a prompt whose blocks are these letters."""
    return [path[: end + 1].encode() for end in range(len(path))]


def test_the_longest_known_beginning_is_found() -> None:
    """With the replicas that it was sent to, latest first."""
    index = PrefixIndex()
    assert index.match(blocks("abc")) is None
    index.add(blocks("ab"), "one")
    index.add(blocks("abcd"), "two")
    index.add(blocks("ax"), "three")
    assert index.match(blocks("abcde")) == Match(("two",), True)
    assert index.match(blocks("aby")) == Match(("two", "one"), False)
    assert index.match(blocks("ay")) == Match(("three", "two", "one"), False)
    assert index.match(blocks("y")) is None
    assert index.match([]) is None


def test_index_separates_continued_prompts_from_those_that_begin_alike() -> None:
    """Samples and turns are of one kind, a system prompt of the other."""
    index = PrefixIndex()
    index.add(blocks("sys1"), "one")
    for path, is_whole in {"sys1": True, "sys1+": True, "sys2": False, "sys": True}.items():
        match = index.match(blocks(path))
        assert match is not None and match.is_whole is is_whole, path


def test_a_prefix_has_its_last_replicas_only() -> None:
    """A hot prefix is at every replica, and the index does not grow with their number."""
    index = PrefixIndex(max_holders=2)
    for instance_id in ("one", "two", "one", "three"):
        index.add(blocks("a"), instance_id)
    match = index.match(blocks("a"))
    assert match is not None and match.holders == ("three", "one")


def test_what_was_not_sent_for_longest_is_forgotten_from_its_end() -> None:
    """So that what remains of a prompt can still be found."""
    index = PrefixIndex(max_blocks=4)
    index.add(blocks("abc"), "one")
    index.add(blocks("xy"), "two")
    assert len(index) == 4
    assert index.match(blocks("abc")) == Match(("one",), False)
    assert index.match(blocks("xy")) == Match(("two",), True)
    index.add(blocks("abc"), "one")
    assert index.match(blocks("xy")) == Match(("two",), False)


@UNTIMED
@given(st.lists(st.tuples(PATHS, st.sampled_from(["one", "two", "three"])), max_size=12), PATHS)
def test_the_index_is_right_about_what_it_has_room_for(sent: list[tuple[list[bytes], str]], asked: list[bytes]) -> None:
    """Against all that was sent: the replicas of the longest beginning, and whether a prompt went on from it."""
    index = PrefixIndex(max_holders=3)
    for path, instance_id in sent:
        index.add(path, instance_id)
    known = [block for block in asked if any(block in path for path, _ in sent)]
    if not known:
        assert index.match(asked) is None
        return
    deepest = known[-1]
    holders = {instance_id for path, instance_id in sent if deepest in path}
    goes_on = any(deepest in path[:-1] for path, _ in sent)
    match = index.match(asked)
    assert match is not None
    assert set(match.holders) == holders and len(match.holders) == len(holders)
    assert match.is_whole is (deepest == asked[-1] or not goes_on)


@UNTIMED
@given(st.lists(PATHS, max_size=12), st.integers(1, 6))
def test_the_index_never_outgrows_its_bound(sent: list[list[bytes]], max_blocks: int) -> None:
    """Nor does what it remembers beside the replicas."""
    index = PrefixIndex(max_blocks=max_blocks)
    for path in sent:
        index.add(path, "one")
        assert len(index) <= max_blocks
        assert len({*kept(index, bytes)}) <= max_blocks


@pytest.mark.parametrize("bound", [{"max_blocks": 0}, {"max_holders": 0}])
def test_an_index_without_room_is_refused(bound: dict[str, int]) -> None:
    """It would know nothing. Room for one is enough."""
    PrefixIndex(max_blocks=1, max_holders=1).add(blocks("ab"), "one")
    with pytest.raises(ValueError, match="max_blocks"):
        PrefixIndex(**bound)
