"""Pauses of engines that run in lockstep, given up at any time; against vLLM's own pause and resume, without models."""

import asyncio
import random
from collections.abc import AsyncIterator, Sized

import pytest

from genserve.control.leases import LeaseTable
from genserve.control.pause import PauseController
from genserve.control.state import StateBoard
from genserve.engine.types import KvPolicy, PauseCounts, PauseMode
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.scheduling import Scheduling
from genserve.errors import DeadlineError
from tests.support.refusals import refuses
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.engine.lockstep_cores import Cores

LONG = 10**9


@pytest.fixture
async def cores(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cores]:
    """Two engines, neither of which dies."""
    pair = Cores(monkeypatch)
    yield pair
    failures = pair.failures
    pair.close()
    assert failures == []


class LockstepEngine(ScriptedEngine):
    """An engine whose pause and resume are those of the daemon, over these two."""

    def __init__(self, cores: Cores) -> None:
        super().__init__()
        self.liveness = Liveness()
        self.scheduling = Scheduling(cores, self.liveness)  # type: ignore[arg-type]

    async def pause(self, mode: PauseMode, kv_policy: KvPolicy, timeout_s: float) -> PauseCounts:
        await self.scheduling.pause(mode, kv_policy, timeout_s)
        return PauseCounts(kept=0, aborted=0)

    async def resume(self, timeout_s: float) -> None:
        await self.scheduling.resume(timeout_s)

    @property
    def settling(self) -> Sized:
        return self.liveness.settling

    async def settled(self) -> None:
        await self.liveness.settled()


@pytest.fixture
async def pauses(cores: Cores) -> AsyncIterator[PauseController]:
    """Of the two engines; ends as the daemon would when they could not be resumed."""
    engine, leases = LockstepEngine(cores), LeaseTable()
    controller = PauseController(engine, leases, StateBoard(engine, lambda: leases.active, "test"))
    background = asyncio.create_task(controller.run())
    yield controller
    assert not background.done(), background.exception()
    background.cancel()
    await asyncio.wait({background})


async def pause(pauses: PauseController, mode: PauseMode, timeout_s: float = 10.0) -> str:
    """A lease."""
    options = {"holder": "t", "ttl_s": 60.0, "timeout_s": timeout_s}
    return (await pauses.pause(mode, KvPolicy.RECOMPUTE, **options)).lease_id  # type: ignore[arg-type]


async def test_vllm_refuses_to_resume_while_a_pause_is_pending(cores: Cores) -> None:
    """The rule that all of this is about."""
    cores.request(0, LONG)
    await cores.until_steps(0)
    pausing = asyncio.create_task(cores.pause_scheduler_async("wait", clear_cache=False))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="pause is still in flight"):
        await cores.resume_generation()
    cores.finish()
    await pausing
    await cores.resume_generation()


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["its time is over", "its client goes"])
async def test_a_pause_that_is_given_up_ends_when_its_requests_do(
    cores: Cores, pauses: PauseController, ends: str
) -> None:
    """The one who gave it up is told at once, the next one waits, and the daemon goes on."""
    cores.request(1, LONG)
    await cores.until_steps(1)
    if ends == "its time is over":
        with pytest.raises(DeadlineError):
            await pause(pauses, PauseMode.WAIT, 0.05)
    else:
        waiting = asyncio.create_task(pause(pauses, PauseMode.WAIT))
        await cores.until_steps(1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    with refuses(DeadlineError):
        await pause(pauses, PauseMode.KEEP, 0.05)
    await cores.until_steps(1)
    cores.finish()
    lease_id = await pause(pauses, PauseMode.KEEP)
    await pauses.resume(lease_id)
    cores.request(0, LONG)
    await cores.until_steps(0)


async def test_pause_given_up_under_a_lease_starts_no_second_one_too_early(
    cores: Cores, pauses: PauseController
) -> None:
    """ABORT under a lease is a pause, and so is its undoing. Both engines take both."""
    for _ in range(40):
        cores.request(0, 20)
        lease_id = await pause(pauses, PauseMode.KEEP)
        ending = asyncio.create_task(pause(pauses, PauseMode.ABORT))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        ending.cancel()
        await asyncio.wait({ending})
        await pauses.resume(lease_id, force=True)
        cores.request(0, 5)
        await cores.until_steps(0)


async def test_pauses_that_are_given_up_at_any_time_leave_engines_that_serve(
    cores: Cores, pauses: PauseController
) -> None:
    """In every mode, with one engine at work, both or none."""
    chance = random.Random(0)
    for _ in range(40):
        for index in (0, 1):
            if chance.random() < 0.6:
                cores.request(index, chance.choice([3, 50, 500]))
        pausing = asyncio.create_task(pause(pauses, chance.choice(list(PauseMode))))
        for _ in range(chance.choice([0, 1, 2, 20])):
            await asyncio.sleep(0)
        pausing.cancel()
        await asyncio.wait({pausing})
        await pauses.resume("", force=True)
        cores.request(0, 5)
        await cores.until_steps(0)
