"""A version that is prepared while its bytes arrive: as exact as any, and in nobody's way."""

import asyncio
from dataclasses import replace

import pytest

from genserve.control.asleep import SleepDepth
from genserve.control.conditions import Phase
from genserve.engine.types import PauseMode
from genserve.errors import DeadlineError, GenserveError, PushConflictError, PushRolledBackError, PushTruncatedError
from genserve.tensors.manifest import Manifest
from genserve.weights.push.stream import PushStream
from genserve.weights.push.types import ApplyOptions, PrepareMode, PushAction, PushState
from genserve.weights.vllm_transfer import UpdateOptions
from tests.support.clocks import advanced_clock
from tests.support.patience import turns, until
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import MANIFEST, Rig, after, further, header, send, tensors, weights
from tests.unit.weights.prepared import is_preparing
from tests.unit.weights.transfers import HALF, finish

BYTES = len(weights(0))


pytestmark = pytest.mark.usefixtures("takes_arriving_weights")


async def until_called(rig: Rig, call: str, times: int = 1) -> None:
    """Returns when the engine was asked for it so often."""
    await until(lambda: rig.engine.calls.count(call) >= times)


async def assert_nothing_is_left(rig: Rig) -> None:
    """Neither in the engine nor in the daemon."""
    async with rig.applier.between_pushes(30.0):
        pass
    await until(lambda: not [task for task in asyncio.all_tasks() if "prepar" in task.get_name()])
    assert rig.engine.prepared == {}
    assert rig.board.phase is Phase.RUNNING


async def assert_applied(rig: Rig, seed: int, *streams: PushStream) -> None:
    """The streams of a push have sent everything: its weights are live, and nothing else is left of it."""
    await asyncio.gather(*(stream.finish() for stream in streams))
    for stream in streams:
        stream.detach()
    assert rig.engine.live == tensors(seed)
    await assert_nothing_is_left(rig)


async def test_it_begins_before_the_bytes_and_ends_after_them(rig: Rig) -> None:
    """One preparation, and the version is what was sent last."""
    stream = await rig.registry.open(header())
    await until_called(rig, "prepare_weights")
    assert rig.registry.report("p1").push.state is PushState.RECEIVING
    send(stream, weights(1), 0, 14)
    with advanced_clock() as clock:
        await clock.advance(1.0)  # workers look again and again what is there
        assert rig.engine.prepared == {}
        send(stream, weights(1), 14)
        outcome = await stream.finish()
    stream.detach()
    assert rig.engine.calls[:4] == ["prepare_weights", "pause keep recompute", "commit_weights 1", "resume"]
    assert rig.engine.live == tensors(1)
    assert outcome.applied is not None
    await assert_nothing_is_left(rig)


async def test_bytes_that_come_in_another_order_are_waited_for(rig: Rig) -> None:
    """What counts is how many are there without a gap."""
    stream = await rig.registry.open(header())
    await until_called(rig, "prepare_weights")
    with advanced_clock() as clock:
        for start in (28, 14, 21, 7, 0):
            await clock.advance(1.0)  # workers look again and again what is there
            assert rig.engine.prepared == {}
            send(stream, weights(1), start, min(start + 7, BYTES))
        await assert_applied(rig, 1, stream)


@pytest.mark.parametrize("action", [PushAction.STAGE, PushAction.VALIDATE])
async def test_what_is_not_applied_as_it_is_sent_is_not_prepared(rig: Rig, action: PushAction) -> None:
    """It may never be."""
    stream = await rig.registry.open(header(action=action))
    if action is PushAction.STAGE:
        send(stream, weights(1))
    await stream.finish()
    stream.detach()
    await turns()
    assert rig.engine.calls == []


async def test_a_partial_push_is_prepared_when_it_is_complete(rig: Rig) -> None:
    """What it lacks is copied behind its own bytes."""
    part = Manifest(MANIFEST.tensors[:1], 16, partial=True)
    stream = await rig.registry.open(header(manifest=part))
    await turns()
    assert rig.engine.calls == []
    send(stream, weights(1)[:16])
    await stream.finish()
    stream.detach()
    assert rig.engine.live == {"a": weights(1)[:16], "b": weights(0)[16:]}


async def test_workers_on_other_hosts_fetch_what_is_complete(rig: Rig) -> None:
    """They cannot see it arrive."""
    rig.engine.weights.takes_arriving = False
    stream = await rig.registry.open(header())
    await turns()
    assert rig.engine.calls == []
    stream.detach()


async def test_a_staged_push_that_overtakes_it_is_applied_at_once(rig: Rig) -> None:
    """The slower one is prepared anew when its bytes are there."""
    await rig.push(header("fast", 1, action=PushAction.STAGE))
    slow = await rig.registry.open(header("slow", 2))
    await until_called(rig, "prepare_weights")
    send(slow, weights(2), 0, 14)
    await rig.registry.commit("fast", ApplyOptions())
    assert rig.engine.live == tensors(1)
    assert rig.engine.calls[:3] == ["prepare_weights", "discard_weights running", "prepare_weights"]
    send(slow, weights(2), 14)
    await slow.finish()
    slow.detach()
    assert rig.engine.live == tensors(2)
    await assert_nothing_is_left(rig)


async def test_a_sleep_does_not_wait_for_it(rig: Rig) -> None:
    """Its sender may have stopped; the push is applied after the wake-up."""
    stream = await rig.registry.open(header())
    await until_called(rig, "prepare_weights")
    send(stream, weights(1), 0, 14)
    await rig.sleeps.sleep(PauseMode.KEEP, SleepDepth.of(1, ()), 60.0)
    assert rig.engine.calls[:2] == ["prepare_weights", "discard_weights running"]
    assert rig.engine.prepared == {}
    await rig.sleeps.wake_up()
    send(stream, weights(1), 14)
    await assert_applied(rig, 1, stream)


@pytest.mark.parametrize("end", ["cut off", "conflict", "discarded"])
async def test_a_push_that_ends_early_takes_it_along(rig: Rig, end: str) -> None:
    """Whatever ends it: nothing stays in the engine."""
    stream = await rig.registry.open(header())
    await until_called(rig, "prepare_weights")
    send(stream, weights(1), 0, 14)
    match end:
        case "cut off":
            stream.detach()
        case "conflict":
            with pytest.raises(PushConflictError):
                stream.write(0, b"other", None)
        case "discarded":
            rig.registry.discard("p1", force=True)
    await until_called(rig, "discard_weights running")
    with pytest.raises(GenserveError):
        await assert_applied(rig, 0, stream)


async def test_a_push_that_was_cut_off_goes_on(rig: Rig) -> None:
    """Bytes that are there are not sent again, and are prepared again."""
    opened = header(attempt="one")
    stream = await rig.registry.open(opened)
    send(stream, weights(1), 0, 14)
    stream.detach()
    await until_called(rig, "discard_weights running")
    stream = await rig.registry.open(opened)
    await until_called(rig, "prepare_weights", 2)
    send(stream, weights(1), 14)
    await assert_applied(rig, 1, stream)


async def test_an_end_with_bytes_missing_is_reported(rig: Rig) -> None:
    """As without it."""
    stream = await rig.registry.open(header())
    await until_called(rig, "prepare_weights")
    send(stream, weights(1), 0, 14)
    with pytest.raises(PushTruncatedError):
        await stream.finish()
    stream.detach()
    await assert_nothing_is_left(rig)


async def test_a_version_that_workers_refuse_changes_nothing(rig: Rig) -> None:
    """They may refuse it before its last byte; the trainer is told when it has sent all."""
    rig.engine.fails["prepare_weights"] = PushRolledBackError("no tensor gave a value to x")
    stream = await rig.registry.open(header())
    await until_called(rig, "prepare_weights")
    send(stream, weights(1))
    with refuses(PushRolledBackError, says="no tensor gave a value to x"):
        await stream.finish()
    stream.detach()
    assert rig.engine.live == tensors(0)
    assert rig.registry.report("p1").push.state is PushState.FAILED
    await assert_nothing_is_left(rig)
    await rig.push(header())
    assert rig.engine.live == tensors(1)


async def test_one_that_hangs_ends_with_the_time_for_applying(rig: Rig) -> None:
    """However long the bytes took."""
    rig.engine.gates["prepare_weights"] = Gate()
    stream = await rig.registry.open(header(apply=ApplyOptions(timeout_s=60.0)))
    send(stream, weights(1))
    with advanced_clock() as clock:
        with pytest.raises(DeadlineError):
            await after(clock, 61.0, stream.finish(), lambda: is_preparing(rig))
        stream.detach()
        rig.engine.gates.clear()
        assert rig.engine.live == tensors(0)
        await assert_nothing_is_left(rig)


async def test_what_nobody_has_asked_to_be_prepared_is_not_called_so(rig: Rig) -> None:
    """Although workers have prepared it when the engine does not stop in time: it has no digest, for example."""
    await rig.push(header(action=PushAction.STAGE))
    async with rig.pauses.undisturbed(600.0):
        with advanced_clock() as clock, pytest.raises(DeadlineError):
            await after(
                clock, 60.1, rig.push(header(apply=ApplyOptions(timeout_s=60.0))), once=lambda: is_preparing(rig)
            )
    assert rig.registry.report("p1").push.state is PushState.FAILED
    await assert_nothing_is_left(rig)


async def test_what_workers_could_not_prepare_in_time_is_prepared_anew(rig: Rig) -> None:
    """By the commit that follows; what is broken is not kept, nor called prepared."""
    await rig.push(header(action=PushAction.STAGE))
    rig.engine.fails["prepare_weights"] = DeadlineError("a worker is late")
    with refuses(DeadlineError, says="a worker is late"):
        await rig.push(header())
    assert rig.registry.report("p1").push.state is PushState.FAILED
    await rig.registry.commit("p1", ApplyOptions())
    assert rig.engine.live == tensors(1)
    await assert_nothing_is_left(rig)


async def test_the_next_push_is_prepared_early_while_memory_is_freed(rig: Rig) -> None:
    """It begins when that is done, though it was opened before."""
    freeing = rig.engine.gates["discard_weights"] = Gate()
    await rig.push(header())
    stream = await rig.registry.open(header("p2", 2))
    await freeing.reached.wait()
    await turns()
    assert rig.engine.calls.count("prepare_weights") == 1
    freeing.open.set()
    await until_called(rig, "prepare_weights", 2)
    send(stream, weights(2))
    await assert_applied(rig, 2, stream)
    assert rig.engine.calls.count("prepare_weights") == 2


async def test_in_a_hurry_only_what_is_left_of_it_is_done_in_the_pause(rig: Rig) -> None:
    """It begins with the bytes there too."""
    stream = await rig.registry.open(header(apply=ApplyOptions(prepare_mode=PrepareMode.PAUSED)))
    await until_called(rig, "prepare_weights")
    send(stream, weights(1))
    await assert_applied(rig, 1, stream)
    assert rig.engine.calls[:4] == ["prepare_weights", "pause keep recompute", "commit_weights 1", "resume"]


async def test_further_streams_prepare_nothing_more(rig: Rig) -> None:
    """It is one push."""
    opened = header(num_streams=3)
    streams = [await rig.registry.open(opened)]
    streams += [
        await rig.registry.open(replace(opened, manifest=None, manifest_digest=MANIFEST.digest)) for _ in range(2)
    ]
    for stream, start in zip(streams, (0, 14, 28), strict=True):
        send(stream, weights(1), start, min(start + 14, BYTES))
    await assert_applied(rig, 1, *streams)
    assert rig.engine.calls.count("prepare_weights") == 1


async def test_an_attempt_that_follows_one_that_never_ended_takes_it_over(rig: Rig) -> None:
    """One of its streams was never opened, so nobody could tell that no more would come."""
    opened = header(attempt="one", num_streams=2)
    stream = await rig.registry.open(opened)
    await until_called(rig, "prepare_weights")
    send(stream, weights(1), 0, 14)
    stream.detach()
    streams = [await rig.registry.open(opened), await rig.registry.open(further(opened))]
    send(streams[0], weights(1), 14)
    await assert_applied(rig, 1, *streams)
    assert rig.engine.calls.count("prepare_weights") == 1


async def test_an_attempt_that_took_it_over_takes_it_along(rig: Rig) -> None:
    """Workers do not wait for bytes that nobody sends."""
    opened = header(attempt="one", num_streams=2)
    stream = await rig.registry.open(opened)
    await until_called(rig, "prepare_weights")
    stream.detach()
    streams = [await rig.registry.open(opened), await rig.registry.open(further(opened))]
    send(streams[0], weights(1), 0, 14)
    for stream in streams:
        stream.detach()
    await until_called(rig, "discard_weights running")
    await assert_nothing_is_left(rig)


async def test_an_update_through_vllms_transfer_ends_it(rig: Rig) -> None:
    """It would exchange what the live model had before the update."""
    rig.engine.backend = "scripted"
    opened = header("p1", 5, attempt="one", num_streams=2)
    stream = await rig.registry.open(opened)
    send(stream, weights(5), 0, 14)
    await until_called(rig, "prepare_weights")
    stream.detach()  # nobody sends it any more, but the other stream may come
    await rig.transfers.start(UpdateOptions())
    assert rig.engine.calls == ["prepare_weights", "discard_weights running", "pause keep recompute", "transfer_start"]
    await rig.transfers.update("", HALF, 60.0)
    assert await finish(rig) == 1
    streams = [await rig.registry.open(opened), await rig.registry.open(further(opened))]
    send(streams[0], weights(5), 14)
    await assert_applied(rig, 5, *streams)
    assert rig.engine.calls.count("prepare_weights") == 2
