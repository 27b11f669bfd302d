"""What a push costs those who generate: told by its answer as far as it is known then, and by GetPush later."""

import asyncio
import logging

import pytest

from genserve.engine.types import KvPolicy, PauseMode
from genserve.errors import EngineDeadError, GenserveError
from genserve.weights.push.types import Applied, ApplyOptions
from genserve.weights.vllm_transfer import UpdateOptions
from tests.support.patience import STEP_S, until
from tests.support.scripted_engine import Gate, ScriptedInterruption
from tests.unit.weights.conftest import Rig, header
from tests.unit.weights.transfers import HALF


def told(rig: Rig, push_id: str = "p1") -> Applied:
    """What GetPush tells."""
    applied = rig.registry.report(push_id).applied
    assert applied is not None
    return applied


async def until_over(rig: Rig) -> None:
    """Returns when what was replaced is freed, and nobody follows a push any more."""
    async with rig.applier.between_pushes(STEP_S):
        await until(lambda: "aftermath of an update" not in {task.get_name() for task in asyncio.all_tasks()})


@pytest.mark.parametrize(("kv_policy", "num_tokens"), [(KvPolicy.RECOMPUTE, 7), (KvPolicy.REUSE, 0)])
async def test_the_answer_tells_the_tokens_and_getpush_the_rest(rig: Rig, kv_policy: KvPolicy, num_tokens: int) -> None:
    """The answer waits for neither the streams nor the freed memory."""
    rig.engine.interruption.over.clear()
    gate = rig.engine.gates["discard_weights"] = Gate()
    answer = (await rig.push(header(apply=ApplyOptions(kv_policy=kv_policy)))).applied
    assert answer is not None
    assert (answer.recomputed_tokens, answer.longest_wait_s, answer.discard_s) == (num_tokens, None, None)
    rig.engine.interruption.over.set()
    await until(lambda: told(rig).longest_wait_s == 2.5)
    assert told(rig).discard_s is None
    gate.open.set()
    await until(lambda: told(rig).discard_s is not None)


async def test_tokens_that_a_front_end_tells_too_late_are_told_later(rig: Rig) -> None:
    """A push does not wait for a front end that is slow."""
    rig.engine.interruption.telling.clear()
    answer = (await rig.push(header())).applied
    assert answer is not None and answer.recomputed_tokens is None
    rig.engine.interruption.telling.set()
    await until(lambda: told(rig).recomputed_tokens == 7)


async def test_a_push_without_sequences_has_no_longest_wait(rig: Rig) -> None:
    """Nobody waited; 0 would be a measurement."""
    rig.engine.interruption.wait_s = None
    await rig.push(header())
    await until(lambda: told(rig).discard_s is not None)
    assert told(rig).longest_wait_s is None


async def test_a_push_that_leaves_the_engine_paused_has_no_longest_wait(rig: Rig) -> None:
    """Others decide when generation goes on. What it drops itself is its own."""
    grant = await rig.pauses.pause(PauseMode.KEEP, KvPolicy.REUSE, holder="t", ttl_s=None, timeout_s=60.0)
    options = ApplyOptions(pause_lease_id=grant.lease_id)
    answer = (await rig.push(header(apply=options))).applied
    assert answer is not None and (answer.recomputed_tokens, answer.paused_s) == (7, None)
    await until(lambda: told(rig).discard_s is not None)
    assert told(rig).longest_wait_s is None
    again = (await rig.push(header("p2", 2, apply=options))).applied
    assert again is not None and again.recomputed_tokens == 0, "the first one had dropped them"


async def test_a_second_push_does_not_wait_for_what_is_unknown_of_the_first(rig: Rig) -> None:
    """Each gets its own."""
    first = rig.engine.interruption
    first.over.clear()
    await rig.push(header())
    rig.engine.interruption = ScriptedInterruption()
    rig.engine.interruption.wait_s = 4.0
    await rig.push(header("p2", 2))
    await until(lambda: told(rig, "p2").longest_wait_s == 4.0)
    assert told(rig).longest_wait_s is None
    first.over.set()
    await until(lambda: told(rig).longest_wait_s == 2.5)


async def test_a_push_that_fails_tells_nothing(rig: Rig) -> None:
    """Nothing was applied, and nothing is followed."""
    rig.engine.fails["commit_weights"] = GenserveError("no")
    with pytest.raises(GenserveError):
        await rig.push(header())
    assert rig.registry.report("p1").applied is None


async def test_an_engine_that_dies_before_leaves_it_unknown(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """No error that anybody has to read: its end is told elsewhere."""
    rig.engine.interruption.error = EngineDeadError("gone")
    rig.engine.fails["discard_weights"] = EngineDeadError("gone")
    with caplog.at_level(logging.ERROR):
        await rig.push(header())
        await until_over(rig)
    assert (told(rig).longest_wait_s, told(rig).discard_s) == (None, None)
    assert caplog.records == []


async def test_memory_that_could_not_be_freed_took_no_time(rig: Rig) -> None:
    """The log has the error."""
    rig.engine.fails["discard_weights"] = GenserveError("stuck")
    await rig.push(header())
    await until_over(rig)
    assert told(rig).discard_s is None


async def test_another_failure_is_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The push is applied all the same."""
    rig.engine.interruption.error = GenserveError("odd")
    with caplog.at_level(logging.ERROR):
        assert (await rig.push(header())).applied is not None
        await until_over(rig)
    assert "what an update costs" in caplog.text


async def test_an_update_through_vllms_engine_tells_the_tokens(rig: Rig) -> None:
    """Nobody can ask for the rest later: a repeat gets the first answer again."""
    rig.engine.backend = "nccl"
    await rig.transfers.start(UpdateOptions(update_id="u"))
    await rig.transfers.update("u", HALF, 60.0)
    applied = await rig.transfers.finish("u", None, 60.0)
    assert (applied.recomputed_tokens, applied.longest_wait_s, applied.discard_s) == (7, None, None)
    await until_over(rig)
    assert await rig.transfers.finish("u", None, 60.0) is applied
    assert applied.longest_wait_s is None


async def test_a_repeat_gets_the_first_answer_again(rig: Rig) -> None:
    """Two answers that differ would look like two pushes."""
    first = await rig.push(header())
    await until(lambda: None not in (told(rig).longest_wait_s, told(rig).discard_s))
    assert (await rig.push(header())).applied == first.applied
    assert (await rig.registry.commit("p1", ApplyOptions())).applied == first.applied
    assert first.applied is not None and first.applied.longest_wait_s is None
