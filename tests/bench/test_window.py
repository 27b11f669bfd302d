"""What pushes cost is computed from what was seen, and from nothing else."""

import asyncio
import time

import pytest

from bench.measurements.cycle import cost
from bench.updates.window import Plan, Window


def window(arrivals: list[list[tuple[float, int, int]]], pushes: list[tuple[float, float]]) -> Window:
    """From 10 s to 20 s."""
    return Window(len(arrivals), arrivals, pushes, began_at=10.0, ended_at=20.0)


def test_only_tokens_of_the_window_count() -> None:
    """Those of warming up, and those that come after it, do not."""
    figures = window([[(9.0, 100, 0), (11.0, 2, 0), (19.0, 3, 0), (21.0, 100, 0)]], []).figures()
    assert figures["tokens_per_s"] == 0.5
    assert figures["window_s"] == 10.0
    assert "push_s" not in figures


def test_the_longest_wait_includes_one_that_the_window_cuts_off() -> None:
    """A stream that never goes on again is not one that waits for nobody; one from before counts where it ends."""
    figures = window([[(9.0, 1, 0), (12.0, 1, 0)], [(10.0, 1, 0), (19.0, 1, 0)]], []).figures()
    assert figures["longest_wait_s"] == 9.0
    assert window([[(9.0, 1, 0), (12.0, 1, 0)]], []).figures()["longest_wait_s"] == 8.0
    assert window([[(5.0, 1, 0), (12.0, 1, 0), (19.0, 1, 0)]], []).figures()["longest_wait_s"] == 7.0


def test_the_first_new_token_is_of_the_pushed_version() -> None:
    """Of the first stream that has one, and of the last; tokens of the version before count as old until the next
    push begins."""
    arrivals = [
        [(11.0, 1, 0), (12.5, 4, 0), (13.0, 1, 1), (15.5, 2, 1), (17.0, 2, 2)],
        [(11.5, 1, 0), (13.5, 1, 1), (18.0, 1, 2)],
    ]
    figures = window(arrivals, [(12.0, 12.9), (15.0, 16.5)]).figures()
    assert figures["first_new_s"] == 1.5  # 1 s and 2 s
    assert figures["all_new_s"] == 2.25  # 1.5 s and 3 s
    assert figures["push_s"] == pytest.approx(1.2)
    assert figures["old_share"] == (4 + 2) / (4 + 1 + 1 + 2 + 2 + 1)


def test_a_version_that_a_stream_skips_is_new_when_the_next_one_comes() -> None:
    """It computed its keys and values again until then."""
    figures = window([[(11.0, 1, 0), (19.0, 1, 2)]], [(12.0, 13.0), (15.0, 16.0)]).figures()
    assert figures["first_new_s"] == (7.0 + 4.0) / 2
    assert figures["old_share"] == 0.0


def test_a_window_without_a_token_is_refused() -> None:
    """It would say that nothing was lost."""
    with pytest.raises(ValueError, match="no token"):
        window([[(9.0, 1, 0)]], []).figures()


def test_a_push_costs_what_was_not_generated() -> None:
    """Told in seconds of generation without a push."""
    measured = cost({"tokens_per_s": 80.0, "window_s": 20.0}, {"tokens_per_s": 100.0}, num_pushes=4)
    assert measured == {"share": 0.8, "lost_s_per_push": pytest.approx(1.0), "seconds_per_push": 5.0}


async def test_a_push_that_takes_long_delays_the_next() -> None:
    """All are made, none before it is due, and the window ends once every stream has a token of the last version."""
    plan = Plan(2, interval_s=0.2, num_pushes=3, seed=0, way="tmpfs")
    seen = Window(2, [[(0.0, 1, 0)], [(0.0, 1, 0)]])
    late = asyncio.Event()

    async def push(number: int) -> None:
        await asyncio.sleep((0.0, 0.5, 0.0)[number])
        seen.arrivals[0].append((time.monotonic(), 1, number + 1))
        if number == 2:
            late.set()

    async def second_stream() -> None:
        await late.wait()
        await asyncio.sleep(0.1)
        seen.arrivals[1].append((time.monotonic(), 1, 3))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(second_stream())
        tasks.create_task(seen.carry_out(plan, push))
    begins = [begins_at - seen.began_at for begins_at, _ in seen.pushes]
    assert begins[1] >= 0.2
    assert begins[2] >= begins[1] + 0.5
    assert seen.ended_at >= seen.arrivals[1][-1][0]
    assert seen.ended_at - seen.began_at >= 0.6


async def test_a_window_without_pushes_lasts_as_long_as_they_are_planned() -> None:
    """It is what the others are held against."""
    seen = Window(1, [[(0.0, 1, 0)]])

    async def never(number: int) -> None:
        raise AssertionError("there is nothing to push")

    await seen.carry_out(Plan(1, interval_s=0.2, num_pushes=2, seed=0), never)
    assert seen.ended_at - seen.began_at >= 0.4
    assert seen.pushes == []


def test_no_window_repeats_a_prompt() -> None:
    """A prefix that is cached would make the second one cheaper."""
    first, second = (next(Plan(1, 5, 1, seed).prompts(0)) for seed in (1, 2))
    assert len(first) == len(second) == 64
    assert first != second
    assert next(Plan(2, 5, 1, 1).prompts(1)) != first
