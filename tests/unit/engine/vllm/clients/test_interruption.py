"""What one client, and all of them, tell of the sequences that a pause interrupts."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

import pytest

from genserve.engine.vllm.clients.interruption import EngineInterruption, Interruptions, Watch, of_vllm
from genserve.engine.vllm.liveness import Liveness
from genserve.errors import EngineDeadError


class State(SimpleNamespace):
    """vLLM's state of one sequence."""


def state(prompt_len: int, num_tokens: int, last_s: float = 1.0) -> State:
    """A sequence with so many tokens of output, of which the last came at `last_s`."""
    return State(
        prompt_len=prompt_len,
        is_prefilling=num_tokens == 0,
        detokenizer=SimpleNamespace(num_output_tokens=lambda: num_tokens),
        stats=SimpleNamespace(last_token_ts=last_s),
    )


class Others:
    """Other clients of the engine that tell when they are let."""

    def __init__(self, num_tokens: int, wait_s: float | None) -> None:
        self.told = asyncio.Event()
        self.over = asyncio.Event()
        self._num_tokens, self._wait_s = num_tokens, wait_s

    def interrupted(self) -> "asyncio.Future[int]":
        """Says it when `told` is set."""
        return asyncio.create_task(self._interrupted())

    async def _interrupted(self) -> int:
        await self.told.wait()
        return self._num_tokens

    async def longest_wait_s(self) -> float | None:
        """Says it when `over` is set."""
        await self.over.wait()
        return self._wait_s


def test_the_last_token_and_what_has_no_output_are_not_computed_yet() -> None:
    """A prompt that waits, or of which a part is computed, has no output."""
    assert Watch({"a": state(10, 5), "b": state(100, 1), "c": state(7, 0)}, of_vllm).num_computed_tokens == 14 + 100
    assert Watch({}, of_vllm).num_computed_tokens == 0


def test_a_request_without_tokens_has_none_to_lose() -> None:
    """One for an embedding is there too, over HTTP: vLLM has no text of it."""
    pooling = state(7, 0)
    pooling.detokenizer = None
    assert Watch({"a": pooling, "b": state(10, 5)}, of_vllm).num_computed_tokens == 14


async def test_a_watch_is_over_when_each_has_output_again_or_has_ended() -> None:
    """The longest of their waits counts, also that of the sequence which ends with its next output."""
    states = {"goes on": state(1, 1), "ends": state(1, 1), "new": state(1, 0), "aborted": state(1, 1)}
    watch = Watch(states, of_vllm)
    states["goes on"].stats.last_token_ts = 3.0
    watch.step([2.0, 0.5])
    del states["aborted"]
    watch.step([])
    assert watch.waiting
    del states["ends"]
    watch.step([2.5])
    assert not watch.waiting
    assert await watch.longest_wait_s() == 2.5


async def test_without_a_sequence_that_runs_nobody_waits() -> None:
    """Not for 0.0 seconds."""
    watch = Watch({"new": state(1, 0)}, of_vllm)
    assert not watch.waiting
    assert await watch.longest_wait_s() is None


async def test_sequences_still_waiting_when_the_watch_ends_count_until_then() -> None:
    """Their wait is at least as long; others may have waited longer."""
    now = 100.0
    watch = Watch({"a": state(1, 1)}, of_vllm, lambda: now)
    watch.step([0.5])
    now = 107.0
    assert await watch.longest_wait_s(patience_s=0.0) == 7.0
    assert not watch.waiting
    watch = Watch({"a": state(1, 1)}, of_vllm, lambda: now)
    watch.step([9.0])
    assert await watch.longest_wait_s(patience_s=0.0) == 9.0


async def test_sequence_aborted_after_the_watch_ended_has_not_waited() -> None:
    """No step says that it has ended."""
    states = {"a": state(1, 1)}
    watch = Watch(states, of_vllm, lambda: 100.0)
    states.clear()
    assert await watch.longest_wait_s(patience_s=0.0) is None


async def test_the_next_interruption_ends_the_one_before() -> None:
    """Both are told; steps after it are those of the next one."""
    interruptions, states = Interruptions(), {"a": state(1, 1)}
    first = interruptions.begin(Watch(states, of_vllm))
    waiting = asyncio.create_task(first.longest_wait_s())
    await asyncio.sleep(0)
    assert not waiting.done()
    second = interruptions.begin(Watch(states, of_vllm))
    assert await waiting is not None and not first.waiting and second.waiting
    states["a"].stats.last_token_ts = 9.0
    interruptions.step(SimpleNamespace(inter_token_latencies_iter=[8.0]))
    assert await interruptions.longest_wait_s() == 8.0
    interruptions.step(SimpleNamespace(inter_token_latencies_iter=[80.0]))
    assert await interruptions.longest_wait_s() == 8.0
    assert await first.longest_wait_s() != 8.0


async def test_no_interruption_means_no_wait() -> None:
    """As a front end that has just started answers."""
    assert await Interruptions().longest_wait_s() is None


async def test_a_watch_keeps_no_sequence_alive() -> None:
    """A state has the stream of its request."""
    states = {"a": state(1, 1)}
    alive = weakref.ref(states["a"])
    watch = Watch(states, of_vllm)
    states.clear()
    gc.collect()
    assert alive() is None and watch.waiting


async def test_the_clients_add_up_and_the_longest_of_their_waits_counts() -> None:
    """The tokens are known before the waits."""
    others = Others(50, 3.0)
    own = Watch({"a": state(10, 1)}, of_vllm)
    own.end()
    interruption = EngineInterruption(own, [others], Liveness())
    await asyncio.sleep(0)
    assert interruption.num_computed_tokens is None
    with pytest.raises(TimeoutError):  # who gives up waiting does not end it for others
        async with asyncio.timeout(0.0):
            await interruption.told()
    others.told.set()
    await interruption.told()
    assert interruption.num_computed_tokens == 60
    others.over.set()
    assert await interruption.longest_wait_s() == 3.0


async def test_a_daemon_without_front_ends_knows_its_tokens_at_once() -> None:
    """Also when no resume follows that would take a while."""
    interruption = EngineInterruption(Watch({}, of_vllm), [], Liveness())
    assert interruption.num_computed_tokens == 0
    assert await interruption.longest_wait_s() is None


async def test_nobody_waits_for_the_sequences_of_an_engine_that_has_died() -> None:
    """They get no output any more."""
    liveness = Liveness()
    others = Others(0, None)
    interruption = EngineInterruption(Watch({"a": state(1, 1)}, of_vllm), [others], liveness)
    waiting = asyncio.create_task(interruption.longest_wait_s())
    await asyncio.sleep(0)
    liveness.declare_dead("killed")
    with pytest.raises(EngineDeadError):
        await waiting
    others.told.set()  # or its task would wait on in the loop of the next tests
    await interruption.told()
