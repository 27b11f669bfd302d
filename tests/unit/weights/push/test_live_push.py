"""One push: how long its bytes are kept, and what a stream brings to it."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from genserve.errors import DeadlineError, DrainingError, GenserveError, PushConflictError
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import Attempt, LivePush
from genserve.weights.push.types import LoraAdapter, PushIdentity, PushOutcome, PushReport, PushState
from tests.support.refusals import refuses
from tests.unit.weights.conftest import MANIFEST, header, weights
from tests.unit.weights.push.staging import new_staging, stream_to

TTL_S = 10.0
DATA = weights(1)


class Clock:
    """Tells the time that a test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def push(clock: Clock) -> LivePush:
    opened = header(staging_ttl_s=TTL_S, attempt="a")
    return LivePush(opened, MANIFEST.digest, new_staging(), MANIFEST.total_bytes, clock)


@pytest.fixture(autouse=True)
def closed(push: LivePush) -> Iterator[None]:
    yield
    push.staging.close()


async def test_the_time_to_live_counts_from_the_last_bytes_that_were_new(push: LivePush, clock: Clock) -> None:
    """A trainer that sends the same bytes for ever keeps nothing alive."""
    assert push.idle_until_s == 100.0 + TTL_S
    clock.now_s = 103.0
    stream_to(push).write(0, DATA[:8], None)
    assert push.idle_until_s == 103.0 + TTL_S
    clock.now_s = 105.0
    stream_to(push).write(0, DATA[:8], None)
    assert push.idle_until_s == 103.0 + TTL_S


@pytest.mark.parametrize("written", [True, False])
async def test_bytes_that_a_thread_has_written_count_as_those_of_a_message(
    push: LivePush, clock: Clock, written: bool
) -> None:
    """And those that did not come do not."""
    stream = stream_to(push)
    claim = stream.claim(0, 8)
    assert claim is not None
    clock.now_s = 107.0
    stream.settle(claim, written=written)
    assert push.idle_until_s == (107.0 if written else 100.0) + TTL_S
    assert push.staging.counted.total == (8 if written else 0)


@pytest.mark.parametrize(("name", "num_counted"), [("a", 8), ("b", 0), ("", 0)])
async def test_bytes_claimed_before_a_break_count_for_the_same_attempt(
    push: LivePush, name: str, num_counted: int
) -> None:
    """A thread writes them while the next stream begins; another attempt has to send them again."""
    stream = stream_to(push)
    claim, before = stream.claim(0, 8), push.attempt
    assert claim is not None
    assert push.join(header(attempt=name)) is not before
    claim.target[:] = DATA[:8]
    stream.settle(claim, written=True)
    assert push.staging.counted.total == num_counted
    assert push.staging.there.prefix == 8


async def test_a_further_attempt_begins_anew_with_its_own_time(push: LivePush, clock: Clock) -> None:
    """Its header says how long; what is there counts for the attempt of the same name alone."""
    stream_to(push).write(0, DATA[:8], None)
    clock.now_s = 200.0
    first = push.attempt
    again = push.join(replace(push.header, staging_ttl_s=3.0))
    assert again is not first
    assert (push.idle_until_s, push.staging.counted.total) == (203.0, 8)
    push.join(replace(push.header, attempt="b"))
    assert push.staging.counted.total == 0


async def test_a_push_id_stands_for_one_push(push: LivePush) -> None:
    """Another manifest, version or adapter under it is a mistake, and says so."""
    push.identity.check(header(), MANIFEST.digest)
    for other, digest in (
        (header(), "another"),
        (header(weight_version=2), MANIFEST.digest),
        (header(lora=LoraAdapter("policy", "{}")), MANIFEST.digest),
    ):
        with pytest.raises(PushConflictError) as caught:
            push.identity.check(other, digest)
        assert caught.value.metadata == {"push_id": "p1", "weight_version": "1"}
    adapter = PushIdentity("d", 0, LoraAdapter("policy", "{}"))
    for lora in (LoraAdapter("other", "{}"), LoraAdapter("policy", '{"r": 1}'), None):
        with pytest.raises(PushConflictError):
            adapter.check(header(weight_version=0, lora=lora), "d")
    adapter.check(header(weight_version=3, lora=adapter.lora), "d")  # a copy of it, which names the version it got


async def test_bytes_are_read_by_others_while_they_are_good_and_do_not_change(push: LivePush) -> None:
    """From when they are checked to when they are served, or the push has failed."""
    assert not push.is_readable
    stream_to(push).write(0, DATA, None)
    push.lifecycle.go("checking")
    assert not push.is_readable
    push.stage()
    assert push.is_readable
    push.lifecycle.go("preparing")
    assert push.is_readable
    push.lifecycle.go("applying")
    assert push.is_readable
    push.lifecycle.go("applied")
    assert not push.is_readable


async def test_others_come_again_in_a_second(push: LivePush) -> None:
    """The error for those who would change the weights meanwhile."""
    error = push.in_progress()
    assert (error.metadata, error.retry_after_s) == ({"push_id": "p1"}, 1.0)


async def test_what_was_dropped_is_gone(push: LivePush) -> None:
    """For those who send it, for those who read it and for those who come later; and it is dropped once."""
    stream_to(push).write(0, DATA, None)
    push.lifecycle.go("checking")
    push.stage()
    error = DrainingError("the daemon is shutting down")
    push.drop(error)
    assert (push.lifecycle.state, push.is_readable, push.gone.is_set()) == (State.GONE, False, True)
    assert push.report().state is PushState.FAILED
    for told in (lambda: stream_to(push).write(0, DATA, None), lambda: stream_to(push).claim(0, 1)):
        with pytest.raises(DrainingError):
            told()
    with pytest.raises(DrainingError):
        await push.attempt.result
    with pytest.raises(RuntimeError):
        push.drop(error)


async def test_an_incomplete_push_says_what_it_lacks(push: LivePush) -> None:
    """Bytes, or end frames where every byte is there."""
    stream_to(push).write(0, DATA[:8], None)
    lacks_bytes = push.truncation()
    stream_to(push).write(8, DATA[8:], None)
    lacks_ends = push.truncation()
    assert [error.metadata["missing_bytes"] for error in (lacks_bytes, lacks_ends)] == ["24", "0"]


async def test_a_push_that_failed_says_why_and_waits_for_another_commit(push: LivePush) -> None:
    """Nobody waits for its check any more."""
    stream_to(push).write(0, DATA, None)
    push.lifecycle.go("checking")
    assert push.is_settling
    push.fail(ValueError("no"))
    assert (push.lifecycle.state, push.is_settling, push.lifecycle.can_commit) == (State.FAILED, False, True)
    assert [issue.description for issue in push.report().issues] == ["no"]


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


async def test_waiting_streams_are_answered_a_moment_after_the_time(
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
