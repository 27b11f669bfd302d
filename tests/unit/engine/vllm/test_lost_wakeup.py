"""An engine whose processes sleep because one of their wake-ups got lost: vLLM wakes it 5 s later."""

import asyncio
from collections.abc import Callable

import pytest

from genserve.engine.vllm.activity import Activity
from genserve.engine.vllm.heartbeat import LOST_WAKEUP_S, Heartbeat, HeartbeatLimits
from genserve.engine.vllm.liveness import Liveness
from tests.support.clocks import leaping_clock
from tests.support.patience import slow

LIMITS = HeartbeatLimits(timeout_s=5.0, step_s=300.0)
"""As an engine has them by default."""
VLLM_LOOKS_AGAIN_S = 5.0


class Asleep:
    """Its processes do nothing. It answers the first ping at once, and the later ones after some seconds."""

    def __init__(self, answers_after_s: float) -> None:
        self.liveness = Liveness()
        self._answers_after_s = answers_after_s
        self.num_answers = 0

    async def ping(self, workers: bool) -> None:
        if self.num_answers:
            await slow(self._answers_after_s)
        self.num_answers += 1

    def any_stopped(self) -> bool:
        return False

    def activity(self) -> Activity:
        return Activity(cpu_s=10.0, works=False, stopped=False, steps=100)


async def beat(engine: Asleep, tell: Callable[[bool], None], for_s: float) -> None:
    """The heartbeat runs for so long, or until the engine is dead."""
    loop = asyncio.get_running_loop()
    with leaping_clock():
        heartbeat = Heartbeat(engine.liveness, engine.ping, engine, LIMITS, tell, clock=lambda: loop.time())
        beating = asyncio.create_task(heartbeat.run())
        await asyncio.wait({beating}, timeout=for_s)
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


@pytest.mark.parametrize("late_s", [0.0, 0.5])
async def test_an_engine_that_wakes_up_by_itself_is_not_given_up(late_s: float) -> None:
    """Health says NOT_SERVING meanwhile."""
    engine, told = Asleep(VLLM_LOOKS_AGAIN_S + late_s), list[bool]()
    await beat(engine, told.append, for_s=60.0)
    assert not engine.liveness.dead and engine.num_answers > 5
    assert told[:2] == [False, True]


async def test_an_engine_that_sleeps_for_longer_is_given_up() -> None:
    """With the control: an engine that was given up is dead."""
    engine = Asleep(LOST_WAKEUP_S + 2.0)
    await beat(engine, lambda serves: None, for_s=60.0)
    assert engine.liveness.dead
