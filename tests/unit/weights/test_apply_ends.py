"""Pushes whose apply ends early: the lease is lost, the engine dies, or the loop cancels it."""

import asyncio
import logging

import pytest

from genserve.control.conditions import Phase
from genserve.errors import EngineDeadError, EngineTaintedError, PauseLeaseLostError
from genserve.weights.push.types import ApplyOptions, PushState
from tests.support.patience import STEP_S
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import Rig, header, tensors


async def test_a_lease_that_is_lost_is_reported_before_anything_is_prepared(rig: Rig) -> None:
    """Which may take minutes."""
    with pytest.raises(PauseLeaseLostError):
        await rig.push(header(apply=ApplyOptions(pause_lease_id="lost")))
    assert "prepare_weights" not in rig.engine.calls


async def test_an_engine_that_dies_while_it_is_healed_is_dead(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Not tainted: no push can heal it. Its memory goes with it, which is no error that anybody has to read."""
    gate = rig.engine.gates["commit_weights"] = Gate()
    rig.engine.fails["commit_weights"] = EngineTaintedError("half")
    pushing = asyncio.create_task(rig.push(header()))
    await gate.reached.wait()
    rig.engine.fails |= {step: EngineDeadError("gone") for step in ("prepare_weights", "discard_weights")}
    with caplog.at_level(logging.ERROR, logger="genserve.weights.apply"):
        gate.open.set()
        with pytest.raises(EngineDeadError):
            await pushing
    assert (rig.board.phase, rig.engine.running) == (Phase.DEAD, False)
    assert [record.getMessage() for record in caplog.records if "could not be freed" in record.getMessage()] == []


async def test_a_push_whose_apply_is_cancelled_can_be_applied_later(rig: Rig) -> None:
    """As by a loop that is torn down: who waits for it is cancelled as well, and nothing is busy for ever."""
    gate = rig.engine.gates["prepare_weights"] = Gate()
    pushing = asyncio.create_task(rig.push(header()))
    await gate.reached.wait()
    applying = rig.registry.live.find("p1").task
    assert applying is not None
    applying.cancel()
    await asyncio.wait({pushing}, timeout=STEP_S)
    assert pushing.cancelled()
    assert rig.registry.report("p1").push.state is PushState.FAILED
    assert rig.engine.running
    gate.open.set()
    assert (await rig.registry.commit("p1", ApplyOptions())).applied is not None
    assert rig.engine.live == tensors(1)
