"""What is kept of the served version, and what is done with it."""

import asyncio
from pathlib import Path

import pytest

from genserve.errors import (
    ApplyInProgressError,
    ManifestMismatchError,
    NotResidentError,
    PushRolledBackError,
    StagingFullError,
    WeightVersionMismatchError,
)
from genserve.memory.arena import Arena
from genserve.tensors.manifest import Manifest, TensorSpec, completed
from genserve.weights.checkpoint.files import CheckpointFiles
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.weights.checkpoint.space import CheckpointBytes, CheckpointSpace
from genserve.weights.push.types import PushAction, PushState
from genserve.weights.resident import ArenaBytes, ResidentStore, ResidentVersion
from tests.support.patience import turns
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate
from tests.unit.weights.conftest import MANIFEST, Rig, header, num_arenas, open_rig, send, tensors, weights

ONLY_B = Manifest((TensorSpec("b", "BF16", (8,), 0, 16),), 16, partial=True)


def version(number: int) -> ResidentVersion:
    """One in an arena."""
    arena = Arena.allocate(MANIFEST.total_bytes)
    arena.write(0, weights(number))
    return ResidentVersion(number, MANIFEST, ArenaBytes(arena))


def test_checkpoint_bytes_are_those_of_its_files_in_order_of_the_names(tmp_path: Path) -> None:
    """Tensors lie in any order, in several files, some without elements; pieces may begin and end anywhere."""
    (tmp_path / "one").write_bytes(b"....ccccaaaa")
    (tmp_path / "two").write_bytes(b"bb")
    index = CheckpointIndex(
        {
            "c": CheckpointTensor("U8", (4,), 4, tmp_path / "one", 4),
            "a": CheckpointTensor("U8", (4,), 4, tmp_path / "one", 8),
            "b": CheckpointTensor("U8", (2,), 2, tmp_path / "two", 0),
            "b0": CheckpointTensor("U8", (0,), 0, tmp_path / "two", 2),
        }
    )
    source = CheckpointBytes(CheckpointSpace(index, CheckpointFiles([tmp_path / "one", tmp_path / "two"])))
    whole = b"aaaabbcccc"
    for start in range(len(whole) + 1):
        for end in range(start, len(whole) + 1):
            assert source.view(start, end) == whole[start:end]


async def test_replaced_version_is_freed_at_once_or_with_its_last_reader() -> None:
    """A pull goes on over a push; memory does not grow when nobody pulls."""
    before = num_arenas()
    store = ResidentStore(version(1), enabled=True)
    with store.reading() as read:
        store.replace(version(2))
        assert read.view(0, 32) == weights(1)
        assert store.held_bytes == 64
    assert store.held_bytes == 32
    assert num_arenas() == before + 1
    store.release_memory()
    assert num_arenas() == before


async def test_two_arenas_take_turns() -> None:
    """The one of the version before the served one is taken by the next push that is as large."""
    before = num_arenas()
    store = ResidentStore(version(1), enabled=True)
    store.replace(version(2))
    first = await store.arena_for(32)
    assert bytes(first.view(0, 32)) == weights(1), "nothing was cleared"
    second = await store.arena_for(32)
    assert num_arenas() == before + 3
    for arena in (first, second):
        arena.close()
    store.release_memory()
    assert num_arenas() == before


async def test_an_arena_of_another_size_is_given_back_before_one_is_taken() -> None:
    """Never three of them."""
    before = num_arenas()
    store = ResidentStore(version(1), enabled=True)
    store.replace(version(2))
    arena = await store.arena_for(33)
    assert (arena.size_bytes, num_arenas()) == (33, before + 2)
    arena.close()
    store.release_memory()


async def test_an_arena_that_somebody_still_sees_is_not_used_again() -> None:
    """A view would show the bytes of another version."""
    store = ResidentStore(version(1), enabled=True)
    view = store.require().view(0, 32)
    store.replace(version(2))
    arena = await store.arena_for(32)
    arena.write(0, weights(3))
    assert view == weights(1)
    arena.close()
    store.release_memory()


async def test_reader_is_told_when_the_room_of_its_version_is_needed() -> None:
    """It begins again with the present version; a push does not wait for it."""
    store = ResidentStore(version(1), enabled=True)
    with store.reading() as read:
        store.replace(version(2))
        store.release_replaced()
        with pytest.raises(WeightVersionMismatchError):
            read.view(0, 1)
        assert store.held_bytes == 32
    assert store.served is not None and store.served.weight_version == 2
    store.release_memory()


async def test_store_that_is_not_enabled_keeps_nothing() -> None:
    """--no-resident-weights."""
    before = num_arenas()
    first = version(0)
    store = ResidentStore(first, enabled=False)
    first.source.close()  # the store has not taken it
    store.replace(version(1))
    assert num_arenas() == before
    with refuses(NotResidentError, says="--no-resident-weights"):
        store.require()


def test_completed_manifest_leaves_tied_tensors_to_what_they_are_tied_to() -> None:
    """The resident head is of the version before; aligned, as a pushed odd byte would move the rest."""
    base = Manifest((TensorSpec("embed", "F32", (1,), 0, 4), TensorSpec("head", "F32", (1,), 4, 4)), 8)
    pushed = Manifest((TensorSpec("flag", "U8", (1,), 0, 1),), 1, partial=True)
    assert completed(pushed, base, {"head"}).tensors == (
        TensorSpec("flag", "U8", (1,), 0, 1),
        TensorSpec("embed", "F32", (1,), 4, 4),
    )
    assert not completed(pushed, base, ()).partial


@pytest.mark.parametrize("served", [0, 1])
async def test_partial_push_is_completed_from_what_is_served(rig: Rig, served: int) -> None:
    """From the checkpoint's files, or from the last push; and the result is resident as a whole."""
    for number in range(1, served + 1):
        await rig.push(header(f"served {number}", number))
    await rig.push(header("partial", 5, manifest=ONLY_B), weights(5)[16:])
    expected = {"a": tensors(served)["a"], "b": tensors(5)["b"]}
    assert rig.engine.live == expected
    kept = rig.resident.require()
    places = {spec.name: spec for spec in kept.manifest.tensors}
    assert {n: bytes(kept.view(s.offset, s.offset + s.length)) for n, s in places.items()} == expected
    assert not kept.manifest.partial
    assert rig.resident.held_bytes == 32


async def test_partial_push_is_completed_when_it_is_applied(rig: Rig) -> None:
    """What was served when it was staged may have been replaced since."""
    await rig.push(header("staged", 5, manifest=ONLY_B, action=PushAction.STAGE), weights(5)[16:])
    await rig.push(header("between", 3))
    await rig.registry.commit("staged", header().apply)
    assert rig.engine.live == {"a": tensors(3)["a"], "b": tensors(5)["b"]}


async def test_partial_push_without_resident_weights_is_refused(rig: Rig) -> None:
    """Before a byte moves."""
    rig.resident.release_memory()
    with pytest.raises(NotResidentError):
        await rig.registry.open(header(manifest=ONLY_B))


async def test_failed_push_leaves_the_resident_version(rig: Rig) -> None:
    """It goes with what is served."""
    await rig.push(header("one", 1))
    rig.engine.fails["commit_weights"] = PushRolledBackError("no")
    with pytest.raises(PushRolledBackError):
        await rig.push(header("two", 2))
    assert rig.resident.require().weight_version == 1


async def test_push_that_does_not_fit_beside_the_resident_one_replaces_it(tmp_path: Path) -> None:
    """Such as one in float32 of a bfloat16 checkpoint: it is worth more than what it replaces. One beside a staged push
    is refused."""
    async with open_rig(tmp_path, checkpoint=None) as rig:
        large = Manifest((TensorSpec("large", "U8", (80,), 0, 80),), 80)
        await rig.push(header("one", 1))
        await rig.push(header("staged", 2, action=PushAction.STAGE))
        with pytest.raises(StagingFullError):
            await rig.registry.open(header("large", 3, manifest=large))
        assert rig.resident.served is not None
        rig.registry.discard("staged")
        stream = await rig.registry.open(header("large", 3, manifest=large))
        assert rig.resident.served is None
        stream.write(0, bytes(80), None)
        assert (await stream.finish()).push.state is PushState.APPLIED
        assert rig.resident.held_bytes == 80
        stream.detach()


async def test_readers_of_old_versions_make_room_for_a_push(tmp_path: Path) -> None:
    """100 bytes are allowed: 32 resident, 32 of a version that is still pulled, and 48 of a new push."""
    async with open_rig(tmp_path, checkpoint=None) as rig:
        await rig.push(header("one", 1))
        with rig.resident.reading() as read:
            await rig.push(header("two", 2))
            large = Manifest((TensorSpec("large", "U8", (48,), 0, 48),), 48)
            (await rig.registry.open(header("large", 3, manifest=large))).detach()
            assert rig.resident.require().weight_version == 2
            with pytest.raises(WeightVersionMismatchError):
                read.view(0, 1)


@pytest.mark.slow
async def test_memory_is_flat_over_many_pushes(rig: Rig) -> None:
    """Two arenas that take turns, whatever became of the pushes before."""
    await rig.push(header("p0", 1))
    await rig.push(header("p1", 2))
    before = num_arenas()
    for number in range(3, 33):
        if number % 3 == 0:
            rig.engine.fails["prepare_weights"] = PushRolledBackError("no")
            with pytest.raises(PushRolledBackError):
                await rig.push(header(f"p{number}", number))
            rig.registry.discard(f"p{number}")
        else:
            await rig.push(header(f"p{number}", number))
        assert num_arenas() <= before
    await rig.push(header("p33", 33))
    assert num_arenas() == before


async def test_tied_tensors_with_different_bytes_are_refused(tmp_path: Path) -> None:
    """vLLM would use one of them and say nothing about the other."""
    tied = CheckpointIndex({"embed": CheckpointTensor("U8", (4,), 4)}, {"head": "embed"})
    async with open_rig(tmp_path, checkpoint=tied) as rig:
        both = Manifest((TensorSpec("embed", "U8", (4,), 0, 4), TensorSpec("head", "U8", (4,), 4, 4)), 8)
        with refuses(ManifestMismatchError, says="head"):
            await rig.push(header("p1", 1, manifest=both), b"aaaabbbb")
        assert rig.engine.calls == []
        await rig.push(header("p2", 2, manifest=both), b"aaaaaaaa")
        alone = Manifest((TensorSpec("head", "U8", (4,), 0, 4),), 4, partial=True)
        with refuses(ManifestMismatchError, says="'embed'"):
            await rig.registry.open(header("p3", 3, manifest=alone))


async def test_commit_that_expects_another_version_leaves_the_push_staged(rig: Rig) -> None:
    """Nothing was tried: it can be committed later, and no other push takes its place."""
    await rig.push(header("staged", 5, action=PushAction.STAGE))
    with pytest.raises(WeightVersionMismatchError):
        await rig.registry.commit("staged", header().apply, expected_version=3)
    assert rig.registry.report("staged").push.state is PushState.STAGED
    outcome = await rig.registry.commit("staged", header().apply, expected_version=0)
    assert outcome.applied is not None and outcome.applied.active_version == 5
    assert await rig.registry.commit("staged", header().apply) == outcome


async def test_commit_of_a_push_that_is_being_sent_disturbs_nobody(rig: Rig) -> None:
    """Neither when bytes are missing nor when only the end is: who sends is told what becomes of it."""
    stream = await rig.registry.open(header("sent", 5, action=PushAction.STAGE))
    for start, end in ((0, 16), (16, 32)):
        send(stream, weights(5), start, end)
        with pytest.raises(ApplyInProgressError):
            await rig.registry.commit("sent", header().apply)
    assert (await stream.finish()).push.state is PushState.STAGED
    stream.detach()
    assert (await rig.registry.commit("sent", header().apply)).push.state is PushState.APPLIED


async def test_two_commits_of_one_push_apply_it_once(rig: Rig) -> None:
    """Both get the same answer."""
    await rig.push(header("staged", 5, action=PushAction.STAGE))
    gate = rig.engine.gates["commit_weights"] = Gate()
    first = asyncio.create_task(rig.registry.commit("staged", header().apply))
    await gate.reached.wait()
    second = asyncio.create_task(rig.registry.commit("staged", header().apply))
    await turns()
    gate.open.set()
    assert await first == await second
    assert rig.engine.calls.count("commit_weights 5") == 1


def test_a_store_without_a_version_takes_no_memory() -> None:
    """What counts towards the limit is what is there."""
    empty = ResidentStore(None, enabled=True)
    assert (empty.served, empty.served_bytes, empty.spare_bytes) == (None, 0, 0)


async def test_what_is_freed_while_it_is_read_is_not_taken_for_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor that is closed between its check and its use may be that of other memory, or of none: zeros."""
    target = Arena.allocate(MANIFEST.total_bytes)
    for read in (lambda v: v.view(0, 8), lambda v: v.copy_into(target, MANIFEST.tensors[:1])):
        freed = version(1)

        def view(arena: Arena, offset: int, length: int, freed: ResidentVersion = freed) -> memoryview:
            freed.free()
            return memoryview(bytes(length))

        monkeypatch.setattr(Arena, "view", view)
        with pytest.raises(WeightVersionMismatchError):
            read(freed)
    target.close()
