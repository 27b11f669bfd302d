"""What an error about a push says to programs: which one, and what of it."""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from genserve.errors import (
    ApplyInProgressError,
    GenserveError,
    PushConflictError,
    PushNotFoundError,
    PushTruncatedError,
    StagingFullError,
    WeightVersionMismatchError,
)
from genserve.memory import available
from genserve.tensors.manifest import Manifest
from genserve.weights.push.types import PushAction
from tests.support.clocks import advanced_clock
from tests.unit.weights.conftest import MANIFEST, Rig, after, header, nothing_runs, send, weights


async def told(error: type[GenserveError], action: Callable[[], Any]) -> dict[str, str]:
    """The metadata of the error that an action raises."""

    async def act() -> None:
        result = action()
        if inspect.isawaitable(result):
            await result

    with pytest.raises(error) as caught:
        await act()
    return dict(caught.value.metadata)


async def test_a_push_that_is_not_here_is_named(rig: Rig) -> None:
    """By whoever asks for it; also one that has been discarded while it was sent."""
    assert await told(PushNotFoundError, lambda: rig.registry.report("p9")) == {"push_id": "p9"}
    assert await told(PushNotFoundError, lambda: rig.registry.discard("p9")) == {"push_id": "p9"}
    stream = await rig.registry.open(header())
    rig.registry.discard("p1", force=True)
    assert await told(PushNotFoundError, lambda: stream.write(0, b"x", None)) == {"push_id": "p1"}
    assert await told(PushNotFoundError, stream.finish) == {"push_id": "p1"}
    stream.detach()


async def test_a_push_that_lacks_bytes_says_how_many(rig: Rig) -> None:
    """0 where only end frames are missing."""
    stream = await rig.registry.open(header(attempt="a"))
    send(stream, weights(1), 0, 20)
    assert await told(PushTruncatedError, stream.finish) == {"push_id": "p1", "missing_bytes": "12"}
    stream.detach()
    opened = header(num_streams=2, attempt="a")
    first, second = await rig.registry.open(opened), await rig.registry.open(opened)
    send(first, weights(1), 20)
    second.detach()
    assert await told(PushTruncatedError, first.finish) == {"push_id": "p1", "missing_bytes": "0"}
    first.detach()


async def test_an_attempt_that_meets_another_is_told_at_which_push(rig: Rig) -> None:
    """The one that comes, and the one that another has followed."""
    first = await rig.registry.open(header(attempt="a"))
    with advanced_clock() as clock:  # it waits for the first to leave
        other = asyncio.create_task(rig.registry.open(header(attempt="b")))
        await nothing_runs()
        assert await told(PushConflictError, lambda: after(clock, 3.0, other)) == {"push_id": "p1"}
    first.detach()
    rig.registry.discard("p1")
    first = await rig.registry.open(header(attempt="a"))
    first.detach()
    second = await rig.registry.open(header(attempt="b"))
    assert await told(PushConflictError, lambda: first.write(0, b"x", None)) == {"push_id": "p1"}
    second.detach()


async def test_bytes_that_differ_from_the_applied_ones_are_placed(rig: Rig) -> None:
    """Those that cannot be compared have no place."""
    await rig.push(header())
    again = await rig.registry.open(header())
    different = bytes([weights(1)[5] ^ 1])
    assert await told(PushConflictError, lambda: again.write(5, different, None)) == {"push_id": "p1", "offset": "5"}
    again.detach()
    rig.resident.forget("are gone")
    again = await rig.registry.open(header())
    assert await told(PushConflictError, lambda: again.write(5, different, None)) == {"push_id": "p1"}
    again.detach()


async def test_another_push_under_the_same_id_is_told_which_version_has_it(rig: Rig) -> None:
    """Whether that is being sent or was applied."""
    await rig.push(header(action=PushAction.STAGE))
    for _ in range(2):
        metadata = await told(PushConflictError, lambda: rig.registry.open(header(weight_version=2)))
        assert metadata == {"push_id": "p1", "weight_version": "1"}
        await rig.push(header())


async def test_caller_refused_for_an_update_or_a_push_may_retry(rig: Rig) -> None:
    """In a second: the error says what is in progress."""
    await rig.registry.reserve("u1")
    with pytest.raises(ApplyInProgressError) as update:
        await rig.registry.open(header())
    assert (update.value.metadata, update.value.retry_after_s) == ({"update_id": "u1"}, 1.0)
    rig.registry.release()
    stream = await rig.registry.open(header())
    with pytest.raises(ApplyInProgressError) as push:
        await rig.registry.reserve("u2")
    assert (push.value.metadata, push.value.retry_after_s) == ({"push_id": "p1"}, 1.0)
    stream.detach()


async def test_a_reader_of_a_version_that_is_gone_is_told_which(rig: Rig) -> None:
    """Its memory may be another one's by then."""
    await rig.push(header(weight_version=3))
    with rig.resident.reading() as version:
        rig.resident.release_memory()
        metadata = await told(WeightVersionMismatchError, lambda: version.view(0, MANIFEST.total_bytes))
    assert metadata == {"weight_version": "3"}


async def test_a_header_with_the_digest_alone_names_the_push_that_it_waits_for(rig: Rig) -> None:
    """Nobody has brought its manifest."""
    opened = replace(header(staging_ttl_s=20.0), manifest=None, manifest_digest=MANIFEST.digest)
    with advanced_clock() as clock:
        metadata = await told(PushNotFoundError, lambda: after(clock, 21.0, rig.registry.open(opened)))
    assert metadata == {"push_id": "p1"}


async def test_a_push_of_wide_tensors_that_has_no_room_is_told_how_wide_they_are(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who sends float64 to a bfloat16 model may not know that it does."""
    monkeypatch.setattr(available, "available_memory_bytes", lambda: 0)
    manifest = replace(Manifest.end_to_end([("b", "F64", (8,), 64)]), partial=True)
    with pytest.raises(StagingFullError) as full:
        await rig.registry.open(header(manifest=manifest))
    assert "4 times as wide" in full.value.message
    assert full.value.metadata == {"available_bytes": "0"}
