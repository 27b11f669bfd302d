"""Updates through vLLM's own transfer count as pushes do."""

import pytest

from genserve.errors import EngineTaintedError, PushRolledBackError
from genserve.weights.push.types import PushKind
from genserve.weights.vllm_transfer import UpdateOptions
from tests.unit.weights.conftest import Rig
from tests.unit.weights.transfers import HALF, finish


@pytest.fixture
def updating(rig: Rig) -> Rig:
    """With a backend."""
    rig.engine.backend = "scripted"
    return rig


async def test_an_update_counts_when_it_is_served(updating: Rig) -> None:
    """With the steps that it has, and once however often its end is asked for."""
    await updating.transfers.start(UpdateOptions(update_id="u"))
    await finish(updating)
    await updating.transfers.finish("u", None, 60.0)
    measures = updating.registry.measures
    assert measures.outcomes == {(PushKind.TRANSFER, "APPLIED"): 1}
    counts = {step: sum(each.counts) for step, each in measures.steps.items()}
    assert {step for step, count in counts.items() if count} == {"wait", "pause", "receive", "commit", "resume"}
    assert set(counts.values()) == {0, 1}
    assert sum(updating.pauses.standstill.lengths.counts) == 1


async def test_an_update_that_was_undone_is_a_rollback(updating: Rig) -> None:
    """The version before is served again."""
    await updating.transfers.start(UpdateOptions())
    updating.engine.fails["transfer_update"] = PushRolledBackError("broken")
    with pytest.raises(PushRolledBackError):
        await updating.transfers.update("", HALF, 60.0)
    assert updating.registry.measures.outcomes == {(PushKind.TRANSFER, "PUSH_ROLLED_BACK"): 1}


async def test_an_update_that_cannot_be_undone_is_no_rollback(updating: Rig) -> None:
    """The engine is tainted, and says so."""
    updating.resident.forget("are not here")
    await updating.transfers.start(UpdateOptions())
    updating.engine.fails["transfer_update"] = PushRolledBackError("broken")
    with pytest.raises(EngineTaintedError):
        await updating.transfers.update("", HALF, 60.0)
    assert updating.registry.measures.outcomes == {(PushKind.TRANSFER, "ENGINE_TAINTED"): 1}
