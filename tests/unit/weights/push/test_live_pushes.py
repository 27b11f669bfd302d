"""Pushes in flight: how the status lists them, and whom their bytes wake."""

import asyncio
import time

import pytest

from genserve.weights.push.lifecycle import Lifecycle
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.live_pushes import MAX_LISTED, LivePushes
from genserve.weights.push.types import LoraAdapter, PushState
from tests.support.patience import STEP_S, turns
from tests.unit.weights.conftest import MANIFEST, header, weights
from tests.unit.weights.push.staging import new_staging, stream_to

DATA = weights(1)


def opened(push_id: str = "p1", began_at_s: float = 0.0, lora: LoraAdapter | None = None) -> LivePush:
    """A push that nobody sends."""
    push = LivePush(
        header(push_id=push_id, attempt="a", lora=lora), MANIFEST.digest, new_staging(), MANIFEST.total_bytes
    )
    push.attempt.began_at_s = began_at_s
    push.staging.close()
    return push


def listing(*pushes: LivePush) -> LivePushes:
    """All that have bytes here."""
    live = LivePushes(time.monotonic)
    live.update({push.push_id: push for push in pushes})
    return live


async def test_a_push_in_flight_tells_how_far_it_has_come() -> None:
    """Field by field."""
    before_s = time.time()
    lora = LoraAdapter("poet", "{}")
    push = LivePush(
        header(attempt="a", weight_version=7, lora=lora), MANIFEST.digest, new_staging(), MANIFEST.total_bytes
    )
    stream_to(push).write(0, DATA[:8], None)
    push.num_attached = 2
    (told,) = listing(push).in_flight()
    assert (told.push_id, told.state, told.weight_version, told.lora_name) == ("p1", PushState.RECEIVING, 7, "poet")
    assert (told.received_bytes, told.total_bytes, told.num_streams) == (8, MANIFEST.total_bytes, 2)
    assert before_s <= min(told.began_at_s, told.state_since_s)
    assert max(told.began_at_s, told.state_since_s) <= time.time()
    push.staging.close()


async def test_each_chunk_wakes_readers_that_wait_for_bytes() -> None:
    """Those who wait already, and those who looked at what is there before they waited."""
    push = LivePush(header(), MANIFEST.digest, new_staging(), MANIFEST.total_bytes)
    stream = stream_to(push)
    stream.write(0, DATA[:8], None)
    waiting = asyncio.create_task(push.arrived.wait())
    await turns()
    assert not waiting.done()
    stream.write(8, DATA[8:16], None)
    await asyncio.wait_for(waiting, STEP_S)
    following = push.arrived.next
    stream.write(16, DATA[16:24], None)
    assert following.is_set()
    push.staging.close()


async def test_those_that_are_sent_come_first_and_then_the_newest() -> None:
    """Of more than can be listed, the oldest ones that only wait are left out."""
    waiting = [opened(f"w{number}", float(number)) for number in range(MAX_LISTED)]
    sent = opened("sent", -1.0)
    sent.num_attached = 1
    told = [push.push_id for push in listing(*waiting, sent).in_flight()]
    assert told == ["sent", *(f"w{number}" for number in reversed(range(1, MAX_LISTED)))]


async def test_weights_come_before_adapters() -> None:
    """Which may be many. What is sent comes first, whatever it is."""
    pushes = [
        opened("weights", 0.0),
        *(opened(f"a{number}", 1.0 + number, LoraAdapter("a", "{}")) for number in (1, 2)),
    ]
    assert [push.push_id for push in listing(*pushes).in_flight()] == ["weights", "a2", "a1"]
    pushes[1].num_attached = 1
    assert [push.push_id for push in listing(*pushes).in_flight()] == ["a1", "weights", "a2"]


def test_a_state_lasts_since_the_event_that_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further stream of a push that is being received does not begin it anew."""
    now_s = [1.0]
    monkeypatch.setattr(time, "time", lambda: now_s[0])
    lifecycle = Lifecycle()
    assert lifecycle.since_s == 1.0
    now_s[0] = 2.0
    lifecycle.go("joined")
    assert lifecycle.since_s == 1.0
    lifecycle.go("checking")
    assert lifecycle.since_s == 2.0
    with pytest.raises(RuntimeError):
        lifecycle.go("prepared")
    assert lifecycle.since_s == 2.0
