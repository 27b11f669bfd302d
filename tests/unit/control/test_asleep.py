"""What a Sleep and a WakeUp mean, part by part, as in vLLM."""

import itertools
from collections.abc import Sequence

import pytest

from genserve.control.asleep import Asleep, SleepDepth
from genserve.engine.types import ALL_TAGS, SleepTag
from genserve.errors import InvalidFieldError
from tests.support.refusals import refuses

S, W, K = SleepTag.SCHEDULING, SleepTag.WEIGHTS, SleepTag.KV_CACHE
NAMES = {S: "scheduling", W: "weights", K: "kv_cache"}
KV_ALONE = SleepDepth(0, frozenset({S, K}))
STILL = SleepDepth(0, frozenset({S}))


@pytest.mark.parametrize(
    ("level", "names", "depth"),
    [
        (None, (), SleepDepth(1, ALL_TAGS)),
        (0, (), STILL),
        (1, (), SleepDepth(1, ALL_TAGS)),
        (2, (), SleepDepth(2, ALL_TAGS)),
        (None, ("weights", "kv_cache"), SleepDepth(1, ALL_TAGS)),
        (2, ("kv_cache", "weights", "scheduling"), SleepDepth(2, ALL_TAGS)),
        (None, ("kv_cache",), KV_ALONE),
        (None, ("kv_cache", "kv_cache"), KV_ALONE),
        (0, ("kv_cache",), KV_ALONE),
        (None, ("scheduling",), STILL),
        (0, ("scheduling",), STILL),
    ],
)
def test_level_and_tags_mean_one_thing_together(level: int | None, names: Sequence[str], depth: SleepDepth) -> None:
    """Level 1 is the default, and the KV cache alone leaves the weights as they are."""
    assert SleepDepth.of(level, names) == depth


@pytest.mark.parametrize(
    ("level", "names", "field"),
    [
        (3, (), "level"),
        (-1, (), "level"),
        (0, ("weights", "kv_cache"), "level"),
        (2, ("scheduling",), "level"),
        (1, ("scheduling",), "level"),
        (2, ("kv_cache",), "level"),
        (1, ("kv_cache", "scheduling"), "level"),
        (None, ("weights",), "tags"),
        (2, ("weights", "scheduling"), "tags"),
        (None, ("kv_cache", "weight"), "tags[1]"),
        (None, ("",), "tags[0]"),
    ],
)
def test_what_no_sleep_can_be_names_its_field(level: int | None, names: Sequence[str], field: str) -> None:
    """An unknown tag names its place."""
    with refuses(InvalidFieldError, field=field):
        SleepDepth.of(level, names)


@pytest.mark.parametrize(
    ("asleep", "depth", "after"),
    [
        ({}, SleepDepth(1), {S, W, K}),
        ({}, KV_ALONE, {S, K}),
        ({}, STILL, {S}),
        ({S}, KV_ALONE, {S, K}),
        ({S, K}, SleepDepth(2), {S, W, K}),
        ({S, K}, KV_ALONE, None),
        ({S, K}, STILL, None),
        ({S, W}, SleepDepth(2), None),
        ({S, W, K}, SleepDepth(2), None),
    ],
)
def test_a_second_sleep_adds_to_the_first_until_the_weights_sleep(
    asleep: set[SleepTag], depth: SleepDepth, after: set[SleepTag] | None
) -> None:
    """vLLM ignores it from then on: what became of the weights is decided. None: nothing happens."""
    before = Asleep(frozenset(asleep))
    assert before.takes(depth) is (after is not None)
    if after is not None:
        assert before.after_sleep(depth).tags == after


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("lost", [False, True])
def test_only_a_sleep_of_level_2_loses_weights_and_no_other_finds_them(level: int, lost: bool) -> None:
    """What level 1 keeps on the host after that is as lost as it was on the device."""
    tags = ALL_TAGS if level else frozenset({S})
    assert Asleep(frozenset(), lost).after_sleep(SleepDepth(level, tags)).weights_lost is (lost or level == 2)


def test_giving_the_kv_cache_back_loses_no_weights() -> None:
    """A level that would say otherwise is refused."""
    assert not Asleep().after_sleep(SleepDepth.of(None, ["kv_cache"])).weights_lost


EVERY_SLEEP = [frozenset({S, *memory}) for size in range(3) for memory in itertools.combinations((W, K), size)]
EVERY_WAKE_UP = [frozenset(tags) for size in range(4) for tags in itertools.combinations(SleepTag, size)]


@pytest.mark.parametrize("asleep", EVERY_SLEEP)
@pytest.mark.parametrize("woken", EVERY_WAKE_UP)
def test_the_engine_is_awake_when_none_of_its_memory_sleeps(
    asleep: frozenset[SleepTag], woken: frozenset[SleepTag]
) -> None:
    """No tags are all of them; what is awake is left alone; scheduling follows the memory."""
    memory = (asleep - {S}) - (woken or ALL_TAGS)
    assert Asleep(asleep).after_wake_up(woken).tags == (memory | {S} if memory else frozenset())


def test_the_kv_cache_is_not_woken_before_lost_weights() -> None:
    """Waking them last would run the engine before they could be restored."""
    with refuses(InvalidFieldError, field="tags"):
        Asleep(ALL_TAGS, weights_lost=True).after_wake_up({K})
    assert Asleep(ALL_TAGS, weights_lost=True).after_wake_up({W}) == Asleep(frozenset({S, K}), weights_lost=True)


def test_names_come_in_one_order() -> None:
    """Whoever compares two states sees a difference only where there is one."""
    assert Asleep(ALL_TAGS).names == ("scheduling", "weights", "kv_cache")
    assert Asleep().names == ()
