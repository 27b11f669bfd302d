"""Loads from sources that are wrong, slow, or of different minds: what is applied is one version, and a load ends."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from genserve.control.membership import NO_RECORD, FleetCommit, FleetRecord, RouterRun
from genserve.errors import (
    ApplyInProgressError,
    ChecksumMismatchError,
    DrainingError,
    FleetHeldError,
    InvalidFieldError,
    ManifestMismatchError,
    PeersFailedError,
    PushConflictError,
    PushNotFoundError,
    VersionNotNewerError,
)
from genserve.tensors.manifest import Manifest
from genserve.weights.load import loader as loader_module
from genserve.weights.push.types import PushAction, PushOutcome, PushState
from tests.support.clocks import advanced_clock
from tests.support.patience import until
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import (
    MANIFEST,
    Rig,
    after,
    assert_unchanged,
    contents,
    header,
    nothing_runs,
    send,
    tensors,
    weights,
)
from tests.unit.weights.load.scripted_source import ScriptedSource, load_of, loader

OTHER = "0" * 64


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(loader_module, "MAX_DELAY_S", 0.001)


async def loaded(rig: Rig, *sources: ScriptedSource, **fields: object) -> PushOutcome:
    """What came of a load from these."""
    return await loader(rig, *sources).load(load_of(*sources, **fields))


@pytest.mark.parametrize(
    ("unfit", "error"),
    [
        ({"weight_version": 0}, InvalidFieldError),
        ({"weight_version": 1}, VersionNotNewerError),
        ({"identity": "x" * 257}, InvalidFieldError),
        ({"identity": "line\nbreak"}, InvalidFieldError),
        ({"content_digest": "not a digest"}, InvalidFieldError),
        ({"manifest": Manifest(MANIFEST.tensors[:1], 16)}, ManifestMismatchError),
        ({"manifest": Manifest(MANIFEST.tensors, 1 << 60)}, ManifestMismatchError),
    ],
)
async def test_a_source_whose_version_cannot_be_taken_is_passed_over(
    rig: Rig, unfit: dict[str, Any], error: type[Exception]
) -> None:
    """And is not asked again. If there is no other, the call ends with the reason at once."""
    await rig.push(header("before", 1))
    wrong, right = ScriptedSource("wrong", 2, **{"weight_version": 2, **unfit}), ScriptedSource("right", 2, 2)
    with pytest.raises(error):
        await loaded(rig, wrong)
    assert rig.engine.live == tensors(1)
    assert (await loaded(rig, wrong, right)).push.state is PushState.APPLIED
    assert rig.engine.live == tensors(2)
    assert len(wrong.asked) == 2
    gone = ScriptedSource("gone", fails=True)
    with refuses(PeersFailedError, says="wrong: ") as refused:
        await loaded(rig, replace(wrong, asked=[]), gone, push_id="p2")
    assert "gone: " in refused.value.message


async def test_fields_of_the_request_are_refused_before_anybody_is_asked(rig: Rig) -> None:
    """They are the caller's fault, and no source's."""
    source = ScriptedSource()
    for fields in ({"staging_ttl_s": 0.0}, {"content_digest": "x"}, {"weight_version": 1 << 32}, {"push_id": "\n"}):
        with pytest.raises(InvalidFieldError) as caught:
            await loaded(rig, source, **fields)
        (violation,) = caught.value.violations
        assert f"{violation.field}_s" in fields or violation.field in fields
    assert source.asked == []


async def test_a_load_for_a_router_that_has_gone_exchanges_nothing(rig: Rig) -> None:
    """Another one has found what is served, and counts on it."""
    with pytest.raises(FleetHeldError):
        await loaded(rig, ScriptedSource(), fleet=FleetCommit(rig.board.membership, "gone", FleetRecord(7, b"")))
    assert rig.engine.weight_version == 0
    assert (await loaded(rig, ScriptedSource())).push.state is PushState.APPLIED
    assert rig.board.membership.record is NO_RECORD


async def test_the_record_of_the_fleet_is_kept_when_the_version_is_served(rig: Rig) -> None:
    """Before its router is answered; and a repeat keeps that of now."""
    membership, source = rig.board.membership, ScriptedSource()
    gate = rig.engine.gates["resume"] = Gate()
    with membership.looked_after(RouterRun("a", "host:1")):
        loading = asyncio.create_task(loaded(rig, source, fleet=FleetCommit(membership, "a", FleetRecord(7, b"7"))))
        await gate.reached.wait()
        kept = membership.record
        gate.open.set()
        await loading
        assert kept == FleetRecord(7, b"7")
        await loaded(rig, source, fleet=FleetCommit(membership, "a", FleetRecord(8, b"8")))
        assert membership.record == FleetRecord(8, b"8") and len(source.asked) == 1


async def test_two_sources_do_not_take_turns_for_ever(rig: Rig) -> None:
    """Each has a part of its own version, and begins anew once at most."""
    one, two = ScriptedSource("one", identity="one"), ScriptedSource("two", identity="two")

    def send_a_part(source: ScriptedSource) -> None:
        source.sends_bytes = 20 if source.asked[-1] is None else 0

    one.before, two.before = (lambda: send_a_part(one)), (lambda: send_a_part(two))
    with pytest.raises(PeersFailedError):
        await loaded(rig, one, two)
    assert (one.asked.count(None), two.asked.count(None)) == (2, 1)
    await assert_unchanged(rig)


async def test_a_source_that_has_less_than_another_has_sent_may_still_bring_all(rig: Rig) -> None:
    """What it brings is new, although more was there before it."""
    one = ScriptedSource("one", 1, identity="one", sends_bytes=30)
    two = ScriptedSource("two", 1, identity="two", sends_bytes=10)
    one.after = lambda: setattr(one, "fails", True)
    await loaded(rig, one, two)
    assert rig.engine.live == tensors(1)


async def test_sources_with_one_digest_have_one_version(rig: Rig) -> None:
    """One goes on where another one has stopped, whoever brought it there; and all of it is compared."""
    one = ScriptedSource("one", 1, identity="a", content_digest=contents(1), sends_bytes=20)
    two = ScriptedSource("two", 1, identity="b", content_digest=contents(1))
    one.after = lambda: setattr(one, "fails", True)
    await loaded(rig, one, two)
    assert two.asked == [((20, 32),)]
    liar = ScriptedSource("liar", 3, 2, identity="c", content_digest=contents(2), sends_bytes=20)
    honest = ScriptedSource("honest", 2, 2, identity="d", content_digest=contents(2))
    assert (await loaded(rig, liar, honest, push_id="p2")).push.state is PushState.APPLIED
    assert rig.engine.live == tensors(2)


async def test_what_is_discarded_between_two_sources_stays_discarded(rig: Rig) -> None:
    """The call ends, and says so: nobody wants the push any more."""
    one = ScriptedSource("one", identity="a", sends_bytes=20)

    def discard() -> None:
        if len(one.asked) == 2:
            rig.registry.discard("p1")

    one.before = discard
    with pytest.raises(PushNotFoundError):
        await loaded(rig, one)
    assert len(one.asked) == 2
    await assert_unchanged(rig)
    assert rig.engine.calls == []


async def test_what_is_discarded_before_its_source_answers_is_not_fetched(rig: Rig) -> None:
    """Nothing of it is here yet: the call that discards it may overtake the end of the one that loads it."""
    one = ScriptedSource("one")

    def discard() -> None:
        with pytest.raises(PushNotFoundError):
            rig.registry.discard("p1", force=True)

    one.before = discard
    with refuses(PushNotFoundError, says="was discarded"):
        await loaded(rig, one)
    with pytest.raises(PushNotFoundError):
        rig.registry.report("p1")
    one.before = lambda: None
    assert (await loaded(rig, one)).push.state is PushState.APPLIED


async def test_a_silent_source_is_asked_again_until_the_time_to_live_is_over(rig: Rig) -> None:
    """Its trainer may pause, or what it has may take long to be checked there. Nothing is sent twice meanwhile."""
    slow = ScriptedSource(identity="a", sends_bytes=20, is_silent=True)

    def go_on() -> None:
        if len(slow.asked) == 10:
            slow.is_silent, slow.sends_bytes = False, 100
        elif len(slow.asked) > 1:
            slow.sends_bytes = 0

    slow.before = go_on
    await loaded(rig, slow)
    assert rig.engine.live == tensors(1)
    assert slow.asked == [None] + 9 * [((20, 32),)]
    dead = ScriptedSource("dead", 2, 2, identity="b", sends_bytes=0, is_silent=True)
    other = ScriptedSource("other", 2, 2, identity="c")
    await loaded(rig, dead, other, push_id="p2")
    assert rig.engine.live == tensors(2)
    dead.asked.clear()
    loading = loaded(rig, dead, push_id="p3", force=True, staging_ttl_s=60.0)
    with advanced_clock() as clock, pytest.raises((PeersFailedError, PushNotFoundError)):
        await after(clock, 61.0, loading, lambda: len(dead.asked) > 10)
    assert len(dead.asked) > 10


async def test_a_load_never_ends_what_a_trainer_is_sending(rig: Rig) -> None:
    """Whoever has all daemons of a fleet load the push also asks the one that the trainer sends it to."""
    stream = await rig.registry.open(header(attempt="trainer"))
    send(stream, weights(1), 0, 16)
    with advanced_clock() as clock:
        source = ScriptedSource(identity="a")
        loading = asyncio.create_task(loaded(rig, source))
        await until(lambda: None in source.asked)
        await nothing_runs()  # it waits for the trainer to leave
        with pytest.raises(ApplyInProgressError):
            await after(clock, 3.0, loading)
    send(stream, weights(1))
    await stream.finish()
    stream.detach()
    assert rig.engine.live == tensors(1)


async def test_a_shutdown_ends_a_load_between_two_sources(rig: Rig) -> None:
    """As one that receives: the caller asks another daemon, and nobody has discarded anything."""
    closing: list[asyncio.Task[None]] = []
    one = ScriptedSource("one", identity="a", sends_bytes=20)
    two = ScriptedSource("two", identity="a", fails=True, opens_s=0.01)
    two.before = lambda: closing.append(asyncio.create_task(rig.registry.close()))
    with pytest.raises(DrainingError):
        await loaded(rig, one, two)
    await closing[0]
    assert (len(one.asked), len(two.asked)) == (1, 1)


async def test_a_load_without_anything_new_ends_with_the_time_to_live(rig: Rig) -> None:
    """However many sources there are, and however long each of them takes not to answer."""
    silent = [ScriptedSource(f"{index}", opens_s=600.0, fails=True) for index in range(64)]
    loading = asyncio.create_task(loaded(rig, *silent, staging_ttl_s=1000.0))
    with advanced_clock() as clock:
        for source in silent[:2]:
            await until(lambda source=source: source.asked)
            await clock.advance(600.0)
        with pytest.raises(PeersFailedError):
            await loading
    assert [len(source.asked) for source in silent] == [1, 1] + 62 * [0]


async def test_a_repeat_with_other_contents_is_a_conflict(rig: Rig) -> None:
    """Nobody may be told that what he wanted is live."""
    await loaded(rig, ScriptedSource(content_digest=contents(1)))
    again = ScriptedSource()
    assert (await loaded(rig, again, content_digest=contents(1))).push.state is PushState.APPLIED
    with pytest.raises(PushConflictError):
        await loaded(rig, again, content_digest=OTHER)
    with pytest.raises(PushConflictError):
        await loaded(rig, again, weight_version=2)
    assert again.asked == []


async def test_a_repeat_gets_the_first_answer_and_not_what_became_known_after_it(rig: Rig) -> None:
    """As a repeat of a push does."""
    answer = await loaded(rig, ScriptedSource())
    await until(lambda: (known := rig.registry.report("p1").applied) and known.discard_s is not None)
    assert await loaded(rig, ScriptedSource()) == answer
    assert answer.applied is not None and answer.applied.discard_s is None


async def test_a_source_with_wrong_contents_is_named(rig: Rig) -> None:
    """And what it has brought is thrown away; another one is asked."""
    liar = ScriptedSource("liar", 2, identity="a")
    with refuses(ChecksumMismatchError, says="liar: "):
        await loaded(rig, liar, content_digest=contents(1))
    assert "p1" not in rig.registry.live
    honest = ScriptedSource("honest", 1, identity="a")
    await loaded(rig, liar, honest, content_digest=contents(1))
    assert rig.engine.live == tensors(1)


async def test_a_dry_run_takes_no_bytes(rig: Rig) -> None:
    """Only what a source says that it has."""
    source = ScriptedSource()
    assert (await loaded(rig, source, action=PushAction.VALIDATE)).push.state is PushState.VALID
    assert rig.registry.live == {}
