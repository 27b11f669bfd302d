"""A push whose sender is in a hurry: what is left of its preparation is done in the pause."""

import pytest

from genserve.errors import PushRolledBackError
from genserve.weights.push.types import ApplyOptions, PrepareMode
from tests.unit.weights.conftest import Rig, assert_unchanged, header, tensors


async def test_a_push_in_a_hurry_is_prepared_in_the_pause(rig: Rig) -> None:
    """From when every byte is there nothing competes with its preparation."""
    outcome = await rig.push(header(apply=ApplyOptions(prepare_mode=PrepareMode.PAUSED)))
    assert rig.engine.calls == [
        "pause keep recompute",
        "prepare_weights",
        "commit_weights 1",
        "resume",
        "discard_weights running",
    ]
    assert rig.engine.live == tensors(1)
    assert outcome.applied is not None
    steps = outcome.applied.step_s
    assert outcome.applied.paused_s is not None
    assert outcome.applied.paused_s >= steps["prepare"] > 0


@pytest.mark.parametrize("step", ["prepare_weights", "commit_weights"])
async def test_a_push_in_a_hurry_that_fails_changes_nothing(rig: Rig, step: str) -> None:
    """And the engine runs again."""
    rig.engine.fails[step] = PushRolledBackError("no")
    with pytest.raises(PushRolledBackError):
        await rig.push(header(apply=ApplyOptions(prepare_mode=PrepareMode.PAUSED)))
    await assert_unchanged(rig)
