"""Waiting for an engine that may die or hang."""

import asyncio
from dataclasses import dataclass

import pytest

from genserve.engine.vllm.liveness import Liveness, end_of
from genserve.errors import DeadlineError, EngineDeadError
from tests.support.patience import STEP_S
from tests.support.refusals import refuses


@dataclass
class RayManager:
    """As vLLM's CoreEngineActorManager."""

    failed_proc_name: str | None


@dataclass
class Manager(RayManager):
    """As vLLM's CoreEngineProcManager."""

    statuses: dict[str, int]

    def finished_procs(self) -> dict[str, int]:
        return self.statuses


@pytest.mark.parametrize("occupies", [True, False])
async def test_a_call_that_is_given_up_is_left_to_the_engine(occupies: bool) -> None:
    """The engine cannot take it back: it works on it until it answers, and so long it is not settled."""
    liveness, answer = Liveness(), asyncio.Event()
    with refuses(DeadlineError, says="pause"):
        await liveness.call(answer.wait(), what="pause", timeout_s=0.01, occupies=occupies)
    assert (len(liveness.settling), len(liveness.occupying)) == (occupies, 0)
    settling = asyncio.create_task(liveness.settled())
    await asyncio.sleep(0)
    assert settling.done() != occupies
    answer.set()
    await asyncio.wait_for(settling, STEP_S)
    assert not liveness.settling


async def test_a_call_whose_client_has_gone_is_left_to_the_engine_as_well() -> None:
    """The client's cancellation is not waited for."""
    liveness, answer = Liveness(), asyncio.Event()
    calling = asyncio.create_task(liveness.call(answer.wait(), what="digests", timeout_s=60))
    await asyncio.sleep(0)
    assert len(liveness.occupying) == 1
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert liveness.settling
    assert not liveness.occupying
    answer.set()
    await asyncio.wait_for(liveness.settled(), STEP_S)


async def test_a_wait_of_our_own_is_cancelled_when_nobody_waits_for_it() -> None:
    """It asks nothing of the engine."""
    wait = asyncio.Event().wait()
    liveness = Liveness()
    with refuses(DeadlineError, says="prepare"):
        await liveness.wait(wait, what="prepare", timeout_s=0.01)
    await asyncio.sleep(0)
    assert wait.cr_frame is None, "the coroutine still runs"
    assert not liveness.settling


async def test_a_call_ends_when_the_engine_dies() -> None:
    """vLLM's calls would wait for ever; those that were given up end as well."""
    liveness = Liveness()
    with pytest.raises(DeadlineError):
        await liveness.call(asyncio.Event().wait(), what="digests", timeout_s=0.01)
    waiting = asyncio.create_task(liveness.call(asyncio.Event().wait(), what="pause", timeout_s=60))
    settling = asyncio.create_task(liveness.settled())
    await asyncio.sleep(0)
    liveness.declare_dead("EngineCore was ended by SIGKILL")
    with refuses(EngineDeadError, says="SIGKILL"):
        await asyncio.wait_for(waiting, STEP_S)
    await asyncio.wait_for(settling, STEP_S)


async def test_a_result_and_an_error_pass_through() -> None:
    """What the call says is what the caller gets."""

    async def result(value: int) -> int:
        return 1 // value

    assert await Liveness().call(result(1), what="x", timeout_s=1) == 1
    with pytest.raises(ZeroDivisionError):
        await Liveness().call(result(0), what="x", timeout_s=1)


async def test_a_failure_after_the_caller_has_gone_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody else would hear of it."""
    liveness, go = Liveness(), asyncio.Event()

    async def fails() -> None:
        await go.wait()
        raise RuntimeError("no such thing")

    with pytest.raises(DeadlineError):
        await liveness.call(fails(), what="reset", timeout_s=0.01)
    go.set()
    await liveness.settled()
    await asyncio.sleep(0)
    assert "engine reset failed after it was given up: no such thing" in caplog.text


@pytest.mark.parametrize(
    ("manager", "says"),
    [
        (Manager("EngineCore_DP1", {"EngineCore_DP0": -15, "EngineCore_DP1": 3}), "EngineCore_DP1 ended with status 3"),
        (Manager(None, {"EngineCore_DP0": -15}), "EngineCore reported an error: see the log above"),
        (RayManager("Actor 7"), "Actor 7 has ended"),
        (RayManager(None), "EngineCore reported an error: see the log above"),
        (None, "EngineCore reported an error: see the log above"),
    ],
)
def test_the_process_that_ended_first_is_the_cause(manager: object, says: str) -> None:
    """vLLM ends the others after it. It has no status of Ray's actors, and no manager of engines elsewhere."""
    assert end_of(manager) == says
