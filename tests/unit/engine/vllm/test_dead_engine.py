"""What callers get when vLLM says in its own words that its engine has died: none of them may take it for a call that
changed nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from genserve.engine.types import ArenaRef, KvPolicy, PauseMode, SleepTag
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.loras import LiveLoras
from genserve.engine.vllm.scheduling import Scheduling
from genserve.engine.vllm.weights import LiveTransfer, LiveWeights
from genserve.engine.vllm.workers import Workers
from genserve.errors import EngineDeadError
from tests.support.clocks import leaping_clock
from tests.support.patience import turns

CAUSE = "LookupError: a rank was lost"
ALL = {SleepTag.WEIGHTS, SleepTag.KV_CACHE, SleepTag.SCHEDULING}


class DeadCore:
    """As AsyncLLM and its client of EngineCore after the engine's death: every call is refused."""

    def __init__(self) -> None:
        model = SimpleNamespace(is_moe=False, is_multimodal_model=False)
        self.vllm_config = SimpleNamespace(
            model_config=model, parallel_config=SimpleNamespace(data_parallel_size=1), use_v2_model_runner=False
        )
        self.engine_core = self

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("__"):
            raise AttributeError(name)

        async def refuse(*args: Any, **kwargs: Any) -> None:
            raise VllmEngineDeadError

        return refuse


class Parts:
    """Of a VllmEngine, those that ask vLLM for something."""

    def __init__(self) -> None:
        llm: Any = DeadCore()
        self.liveness = Liveness()
        self.workers = Workers(llm, self.liveness, 1)
        self.scheduling = Scheduling(llm, self.liveness)
        self.weights = LiveWeights(llm, self.liveness, self.workers, "")
        self.transfer = LiveTransfer(self.weights)
        self.loras = LiveLoras(self.workers, 1)


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    made = Parts()
    yield made
    made.workers.close()


CALLS: dict[str, Callable[[Parts], Awaitable[object]]] = {
    "attach": lambda parts: parts.weights.attach(60.0, takes_adapters=False),
    "pause": lambda parts: parts.scheduling.pause(PauseMode.KEEP, KvPolicy.RECOMPUTE, 60.0),
    "resume": lambda parts: parts.scheduling.resume(60.0),
    "reset of caches": lambda parts: parts.scheduling.reset_caches(60.0),
    "sleep": lambda parts: parts.scheduling.sleep(1, {SleepTag.WEIGHTS}, 60.0),
    "sleep of keys and values": lambda parts: parts.scheduling.sleep(1, {SleepTag.KV_CACHE}, 60.0),
    "wake-up": lambda parts: parts.scheduling.wake_up(ALL, 60.0),
    "wake-up that stays paused": lambda parts: parts.scheduling.wake_up(ALL, 60.0, paused=True),
    "before a sleep": lambda parts: parts.weights.before_sleep(2, 60.0),
    "prepare": lambda parts: parts.weights.prepare("n", ArenaRef("/a", 0), [], 60.0),
    "commit": lambda parts: parts.weights.commit("n", 1, 60.0),
    "label": lambda parts: parts.weights.label("1", 60.0),
    "discard": lambda parts: parts.weights.discard("n", 60.0),
    "digests": lambda parts: parts.weights.digests(60.0),
    "transfer": lambda parts: parts.transfer.start(60.0),
    "load of an adapter": lambda parts: parts.loras.load("a", SimpleNamespace(directory="", close=lambda: None), 60.0),
    "ping": lambda parts: parts.workers.ping(workers=False),
    "ping of workers": lambda parts: parts.workers.ping(workers=True),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_a_dead_engine_refuses_is_reported_with_the_cause(parts: Parts, call: str) -> None:
    """vLLM refuses calls before it tells anybody that the engine has died. The cause comes another way, a moment
    later."""
    calling = asyncio.ensure_future(CALLS[call](parts))
    await turns()
    assert not calling.done()
    parts.liveness.declare_dead(CAUSE)
    with pytest.raises(EngineDeadError, match=CAUSE):
        await calling
    assert parts.liveness.cause_of_death == CAUSE


async def test_without_a_cause_it_is_told_nevertheless(parts: Parts) -> None:
    """Nobody waits for long."""
    with leaping_clock(), pytest.raises(EngineDeadError, match="see the log"):
        await parts.scheduling.resume(60.0)
    assert parts.liveness.dead
