"""One attempt: when it is over, and the one result that all of its streams get."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from genserve.errors import DeadlineError, GenserveError
from genserve.weights.push.attempt import Attempt
from genserve.weights.push.types import PushOutcome, PushReport, PushState
from tests.support.refusals import refuses

OUTCOME = PushOutcome(PushReport("p1", PushState.APPLIED, 1, 32, 32))
NUM_STREAMS = 2


@pytest.fixture
async def attempt() -> Attempt:
    return Attempt.begin(NUM_STREAMS, "a")


async def test_an_attempt_begins_without_streams(attempt: Attempt) -> None:
    """Nobody has joined it, so that nothing has ended."""
    assert (attempt.num_attached, attempt.num_opened, attempt.num_sending, attempt.num_ended) == (0, 0, 0, 0)
    assert (attempt.is_live, attempt.has_ended, attempt.is_over, attempt.result.done()) == (False, False, False, False)


@pytest.mark.parametrize(("num_ended", "has_ended"), [(NUM_STREAMS - 1, False), (NUM_STREAMS, True), (9, True)])
async def test_it_has_ended_with_the_last_announced_stream(attempt: Attempt, num_ended: int, has_ended: bool) -> None:
    """Streams beyond those that were announced do no harm."""
    attempt.num_opened, attempt.num_sending, attempt.num_ended = num_ended, 1, num_ended
    assert attempt.has_ended is has_ended
    assert attempt.is_over is has_ended


@pytest.mark.parametrize(
    ("num_opened", "num_sending", "is_over"),
    [(NUM_STREAMS - 1, 0, False), (NUM_STREAMS, 1, False), (NUM_STREAMS, 0, True), (NUM_STREAMS + 1, 0, True)],
)
async def test_it_is_over_when_all_streams_have_come_and_none_sends(
    attempt: Attempt, num_opened: int, num_sending: int, is_over: bool
) -> None:
    """One that was cut off does not return; one that has not come yet may come."""
    attempt.num_opened, attempt.num_sending = num_opened, num_sending
    assert attempt.is_over is is_over
    assert not attempt.has_ended


async def test_it_is_live_while_somebody_waits_for_its_result(attempt: Attempt) -> None:
    """A result that has been given is no reason to wait."""
    attempt.num_attached = 1
    assert attempt.is_live
    attempt.answer(OUTCOME)
    assert not attempt.is_live


@pytest.mark.parametrize(("first", "second"), [(OUTCOME, GenserveError("no")), (GenserveError("no"), OUTCOME)])
async def test_the_first_answer_counts(
    attempt: Attempt, first: PushOutcome | Exception, second: PushOutcome | Exception
) -> None:
    """Whoever comes later changes nothing."""
    attempt.answer(first)
    attempt.answer(second)
    if isinstance(first, PushOutcome):
        assert await attempt.result is first
    else:
        with refuses(GenserveError, says="no"):
            await attempt.result


@pytest.mark.parametrize(
    "end",
    [
        lambda attempt: attempt.answer(GenserveError("nobody asks")),
        lambda attempt: attempt.answer(OUTCOME),
        lambda attempt: attempt.result.cancel(),
    ],
)
async def test_a_result_that_nobody_asks_for_is_not_an_error_of_the_loop(end: Callable[[Attempt], Any]) -> None:
    """All clients may be gone."""
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    try:
        attempt = Attempt.begin(NUM_STREAMS, "a")
        end(attempt)
        await asyncio.sleep(0)
        del attempt
        gc.collect()
    finally:
        loop.set_exception_handler(None)
    assert told == []


class Timers:
    """Those that the loop was asked for, with their delays; none of them fires unless a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = asyncio.get_running_loop()
        self._call_later = self._loop.call_later
        self.asked: list[tuple[float, Callable[[], None], asyncio.TimerHandle]] = []
        monkeypatch.setattr(self._loop, "call_later", self._ask)

    def _ask(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        handle = self._call_later(3600.0, callback)
        self.asked.append((delay_s, callback, handle))
        return handle


async def test_who_waits_is_answered_a_moment_after_the_time_is_over(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a second: a step that exceeds the time says more, and ends at about that time."""
    timers = Timers(monkeypatch)
    with attempt.answered_on_time(10.0):
        ((delay_s, fire, _),) = timers.asked
        assert delay_s == 10.25
        fire()
        with pytest.raises(DeadlineError):
            await attempt.result


@pytest.mark.parametrize("fails", [True, False])
async def test_what_ends_on_time_is_not_called_late(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """However it ends: another result may be given later."""
    timers = Timers(monkeypatch)
    try:
        with attempt.answered_on_time(10.0):
            if fails:
                raise GenserveError("no")
    except GenserveError:
        assert fails
    ((_, _, handle),) = timers.asked
    assert handle.cancelled()
    assert not attempt.result.done()
