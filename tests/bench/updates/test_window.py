"""What pushes cost is computed from what was seen, and from nothing else."""

import asyncio

import pytest

from tests.bench.measurements.cycle import cost
from tests.bench.updates.window import Plan, Window


def window(arrivals: list[list[tuple[float, int, int]]], pushes: list[tuple[float, float]]) -> Window:
    """From 10 s to 20 s."""
    return Window(len(arrivals), arrivals, pushes, began_at=10.0, ended_at=20.0)


def test_only_tokens_of_the_window_count() -> None:
    """Those of warming up, and those that come after it, do not."""
    figures = window([[(9.0, 100, 0), (11.0, 2, 0), (19.0, 3, 0), (21.0, 100, 0)]], []).figures()
    assert figures["tokens_per_s"] == 0.5
    assert figures["pushes"] == 0


def test_the_longest_wait_includes_one_that_the_window_cuts_off() -> None:
    """A stream that never goes on again is not one that waits for nobody; one from before counts where it ends."""
    figures = window([[(9.0, 1, 0), (12.0, 1, 0)], [(10.0, 1, 0), (19.0, 1, 0)]], []).figures()
    assert figures["longest_wait_s"] == 9.0
    assert window([[(9.0, 1, 0), (12.0, 1, 0)]], []).figures()["longest_wait_s"] == 8.0
    assert window([[(5.0, 1, 0), (12.0, 1, 0), (19.0, 1, 0)]], []).figures()["longest_wait_s"] == 7.0


def test_the_first_new_token_is_of_the_pushed_version() -> None:
    """Of the first stream that has one, after each push; tokens of the version before count as old until the next."""
    arrivals = [
        [(11.0, 1, 0), (12.5, 4, 0), (13.0, 1, 1), (15.5, 2, 1), (17.0, 2, 2)],
        [(13.5, 1, 1), (18.0, 1, 2)],
    ]
    figures = window(arrivals, [(12.0, 12.9), (15.0, 16.5)]).figures()
    assert figures["first_new_s"] == 1.5  # 1 s and 2 s
    assert figures["push_s"] == pytest.approx(1.2)
    assert figures["old_share"] == (4 + 2) / (4 + 1 + 1 + 2 + 2 + 1)


def test_a_push_that_ends_after_the_window_still_has_its_first_token() -> None:
    """Which is what it cost, however late."""
    figures = window([[(11.0, 1, 0), (24.0, 1, 1)]], [(15.0, 24.5)]).figures()
    assert figures["first_new_s"] == 9.0
    assert figures["tokens_per_s"] == 0.1


def test_a_push_without_a_new_token_has_no_time_to_one() -> None:
    """Rather than a good one."""
    figures = window([[(11.0, 1, 0), (16.0, 1, 0)]], [(15.0, 16.0)]).figures()
    assert "first_new_s" not in figures
    assert figures["old_share"] == 1.0


def test_a_window_without_a_token_is_refused() -> None:
    """It would say that nothing was lost."""
    with pytest.raises(ValueError, match="no token"):
        window([[(9.0, 1, 0)]], []).figures()


def test_a_push_costs_what_was_not_generated() -> None:
    """Told in seconds of generation without a push."""
    measured = cost({"tokens_per_s": 80.0, "pushes": 4.0}, {"tokens_per_s": 100.0}, window_s=20.0)
    assert measured == {"share": 0.8, "lost_s_per_push": pytest.approx(1.0)}


async def test_pushes_begin_when_they_are_due_and_one_that_is_late_delays_the_next() -> None:
    """None begins after the window, and the window ends when the last is answered."""
    plan = Plan(1, interval_s=0.2, num_pushes=4, seed=0, way="tmpfs")
    seen = Window(1, [[(0.0, 1, 0)]])
    numbers = []

    async def push(number: int) -> None:
        numbers.append(number)
        await asyncio.sleep((0.0, 0.75, 0.0)[number])

    await seen.carry_out(plan, push)
    begins = [begins_at - seen.began_at for begins_at, _ in seen.pushes]
    assert numbers == [0, 1, *numbers[2:]]
    assert len(numbers) < 4
    assert begins[0] < 0.2 <= begins[1]
    assert begins[2:] == [] or begins[2] >= begins[1] + 0.75
    assert seen.ended_at - seen.began_at == pytest.approx(0.8)


def test_no_window_repeats_a_prompt() -> None:
    """A prefix that is cached would make the second one cheaper."""
    first, second = (next(Plan(1, 5, 1, seed).prompts(0)) for seed in (1, 2))
    assert len(first) == len(second) == 64
    assert first != second
    assert next(Plan(2, 5, 1, 1).prompts(1)) != first
