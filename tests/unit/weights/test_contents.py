"""The digest of a push's contents: compared with what its header says, told, and kept with the version."""

import asyncio
import hashlib
import os
from collections.abc import Callable

import pytest

from genserve.errors import ChecksumMismatchError, DeadlineError, PushConflictError
from genserve.tensors.content import tensor_digest
from genserve.tensors.manifest import Manifest, TensorSpec
from genserve.weights.push import contents as push_contents
from genserve.weights.push.types import ApplyOptions, PushAction, PushHeader, PushState
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, until
from tests.unit.weights.conftest import MANIFEST, Rig, after, assert_unchanged, contents, header, send, weights
from tests.unit.weights.prepared import PART, commit, is_preparing, preparing, state

OTHER = "0" * 64


@pytest.mark.parametrize("action", [PushAction.APPLY, PushAction.STAGE, PushAction.PREPARE])
async def test_contents_that_are_as_the_header_says_are_served_under_it(rig: Rig, action: PushAction) -> None:
    """Whichever way they come to be applied; computed once."""
    outcome = await rig.push(header(action=action, content_digest=contents(1)))
    assert outcome.push.content_digest == contents(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(push_contents, "tensor_digest", None)
        assert (await commit(rig)).push.content_digest == contents(1)
    served = rig.resident.require()
    assert (served.push_id, served.content_digest) == ("p1", contents(1))
    assert (rig.resident.push_id, rig.resident.content_digest) == ("p1", contents(1))


@pytest.mark.parametrize("action", [PushAction.APPLY, PushAction.STAGE, PushAction.PREPARE])
async def test_other_contents_are_applied_by_nothing(rig: Rig, action: PushAction) -> None:
    """FAILED; neither a commit nor a header that leaves the digest out gets around it."""
    with pytest.raises(ChecksumMismatchError) as mismatch:
        await rig.push(header(action=action, attempt="one", content_digest=OTHER))
    assert mismatch.value.metadata == {"push_id": "p1", "expected": OTHER, "found": contents(1)}
    assert state(rig) is PushState.FAILED
    for call in (commit(rig), rig.push(header(attempt="one"), b""), rig.push(header(attempt="two"))):
        with pytest.raises(ChecksumMismatchError):
            await call
    with pytest.raises(PushConflictError):
        await rig.registry.open(header(content_digest=contents(1)))
    await assert_unchanged(rig)
    rig.registry.discard("p1")
    await rig.push(header(content_digest=contents(1)))
    assert rig.engine.weight_version == 1


async def test_without_a_digest_only_what_is_prepared_has_one(rig: Rig) -> None:
    """It costs a pass over the bytes."""
    assert (await rig.push(header(action=PushAction.STAGE))).push.content_digest == ""
    assert (await commit(rig)).push.content_digest == ""
    assert (rig.resident.push_id, rig.resident.content_digest) == ("p1", "")
    assert (await rig.push(preparing("p2", 2))).push.content_digest == contents(2)


async def test_the_digest_of_a_part_is_that_of_what_it_brings(rig: Rig) -> None:
    """The version that it makes is more than that, and has none."""
    part = hashlib.sha256(f"a\tF32\t4\t{hashlib.sha256(weights(1)[:16]).hexdigest()}\n".encode()).hexdigest()
    told = await rig.push(preparing(manifest=PART, content_digest=part), weights(1)[:16])
    assert told.push.content_digest == part
    await commit(rig)
    assert (rig.resident.push_id, rig.resident.content_digest) == ("p1", "")
    whole = Manifest(MANIFEST.tensors, 32, partial=True)
    await rig.push(header("p2", 2, manifest=whole, content_digest=contents(2)))
    assert rig.resident.content_digest == ""


async def test_a_version_without_bytes_is_still_that_of_its_push(rig: Rig) -> None:
    """Until weights come that no push has brought."""
    await rig.push(header(content_digest=contents(1)))
    rig.resident.release_memory()
    assert rig.resident.served is None
    assert (rig.resident.push_id, rig.resident.content_digest) == ("p1", contents(1))
    rig.resident.forget("came another way")
    assert (rig.resident.push_id, rig.resident.content_digest) == ("", "")


@pytest.mark.parametrize(
    "opened", [header(action=PushAction.PREPARE), header(content_digest=contents(1))], ids=["prepared", "named digest"]
)
async def test_contents_whose_digest_is_needed_are_hashed_while_they_arrive(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, opened: PushHeader
) -> None:
    """Where there are cores for it: the answer waits for the last ones alone."""
    hashed: list[str] = []

    def noted(tensor: TensorSpec, view: Callable[[int, int], memoryview]) -> str:
        hashed.append(tensor.name)
        return tensor_digest(tensor, view)

    monkeypatch.setattr(push_contents, "tensor_digest", noted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    stream = await rig.registry.open(opened)
    send(stream, weights(1), 0, 16)
    await until(lambda: hashed == ["a"])
    send(stream, weights(1), 16)
    assert (await stream.finish()).push.content_digest == contents(1)
    stream.detach()


async def test_a_digest_that_takes_too_long_ends_the_preparation(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the time for applying, which is for all of it."""
    loop, go_on = asyncio.get_running_loop(), asyncio.Event()

    def slow(tensor: TensorSpec, view: Callable[[int, int], memoryview]) -> str:
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(STEP_S)
        return tensor_digest(tensor, view)

    monkeypatch.setattr(push_contents, "tensor_digest", slow)
    pushing = rig.push(preparing(apply=ApplyOptions(timeout_s=60.0)))
    with advanced_clock() as clock:
        with pytest.raises(DeadlineError):
            await after(clock, 60.0, pushing, lambda: is_preparing(rig))
        await until(lambda: state(rig) is PushState.FAILED)
    assert rig.engine.calls[0] == "prepare_weights", "only the digest was late"
    await assert_unchanged(rig)
    go_on.set()
