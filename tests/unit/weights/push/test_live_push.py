"""One push: how long its bytes are kept, and what a stream brings to it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from genserve.errors import DrainingError, PushConflictError
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.types import LoraAdapter, PushIdentity, PushState
from tests.unit.weights.conftest import MANIFEST, header, weights
from tests.unit.weights.push.staging import new_staging

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
    push.write(push.attempt, 0, DATA[:8], None)
    assert push.idle_until_s == 103.0 + TTL_S
    clock.now_s = 105.0
    push.write(push.attempt, 0, DATA[:8], None)
    assert push.idle_until_s == 103.0 + TTL_S


@pytest.mark.parametrize("written", [True, False])
async def test_bytes_that_a_thread_has_written_count_as_those_of_a_message(
    push: LivePush, clock: Clock, written: bool
) -> None:
    """And those that did not come do not."""
    claim = push.claim(push.attempt, 0, 8)
    assert claim is not None
    clock.now_s = 107.0
    push.settle(push.attempt, claim, written=written)
    assert push.idle_until_s == (107.0 if written else 100.0) + TTL_S
    assert push.staging.num_counted == (8 if written else 0)


async def test_a_further_attempt_begins_anew_with_its_own_time(push: LivePush, clock: Clock) -> None:
    """Its header says how long; what is there counts for the attempt of the same name alone."""
    push.write(push.attempt, 0, DATA[:8], None)
    clock.now_s = 200.0
    first = push.attempt
    again = push.join(replace(push.header, staging_ttl_s=3.0))
    assert again is not first
    assert (push.idle_until_s, push.staging.num_counted) == (203.0, 8)
    push.join(replace(push.header, attempt="b"))
    assert push.staging.num_counted == 0


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
    push.write(push.attempt, 0, DATA, None)
    push.begin_check()
    assert not push.is_readable
    push.stage()
    assert push.is_readable
    push.lifecycle.preparing()
    assert push.is_readable
    push.lifecycle.applying()
    assert push.is_readable
    push.lifecycle.applied()
    assert not push.is_readable


async def test_others_come_again_in_a_second(push: LivePush) -> None:
    """The error for those who would change the weights meanwhile."""
    error = push.in_progress()
    assert (error.metadata, error.retry_after_s) == ({"push_id": "p1"}, 1.0)


async def test_what_was_dropped_is_gone(push: LivePush) -> None:
    """For those who send it, for those who read it and for those who come later; and it is dropped once."""
    push.write(push.attempt, 0, DATA, None)
    push.begin_check()
    push.stage()
    attempt, error = push.attempt, DrainingError("the daemon is shutting down")
    push.drop(error)
    assert (push.lifecycle.state, push.is_readable, push.gone.is_set()) == (State.GONE, False, True)
    assert push.report().state is PushState.FAILED
    for told in (lambda: push.write(attempt, 0, DATA, None), lambda: push.claim(attempt, 0, 1)):
        with pytest.raises(DrainingError):
            told()
    with pytest.raises(DrainingError):
        await push.attempt.result
    with pytest.raises(RuntimeError):
        push.drop(error)


async def test_an_incomplete_push_says_what_it_lacks(push: LivePush) -> None:
    """Bytes, or end frames where every byte is there."""
    push.write(push.attempt, 0, DATA[:8], None)
    lacks_bytes = push.truncation()
    push.write(push.attempt, 8, DATA[8:], None)
    lacks_ends = push.truncation()
    assert [error.metadata["missing_bytes"] for error in (lacks_bytes, lacks_ends)] == ["24", "0"]


async def test_a_push_that_failed_says_why_and_waits_for_another_commit(push: LivePush) -> None:
    """Nobody waits for its check any more."""
    push.write(push.attempt, 0, DATA, None)
    push.begin_check()
    assert push.is_settling
    push.fail(ValueError("no"))
    assert (push.lifecycle.state, push.is_settling, push.lifecycle.can_commit) == (State.FAILED, False, True)
    assert [issue.description for issue in push.report().issues] == ["no"]
