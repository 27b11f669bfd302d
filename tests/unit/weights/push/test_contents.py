"""The digest of contents is computed while bytes arrive."""

import asyncio
import gc
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from genserve.aio import Change
from genserve.memory.arena import Arena
from genserve.tensors.content import tensor_digest
from genserve.tensors.manifest import Manifest, TensorSpec
from genserve.weights.push import contents
from genserve.weights.push.contents import Contents
from genserve.weights.push.staging import Staging
from tests.support.patience import STEP_S, until
from tests.unit.weights.conftest import nothing_runs

NUM_TENSORS = 20
LENGTH = 8
DATA = hashlib.sha512(b"tensors").digest() * 3
# The last one in the byte space is the first one by name, as lm_head often is; one has no bytes.
SPECS = tuple(
    TensorSpec(f"t{NUM_TENSORS - number:02}", "U8", (LENGTH,), number * LENGTH, LENGTH) for number in range(NUM_TENSORS)
)
MANIFEST = Manifest((*SPECS, TensorSpec("empty", "U8", (0,), 0, 0)), NUM_TENSORS * LENGTH)


def expected() -> str:
    """As the comment of PushHeader.content_digest says."""
    lines = [
        f"{t.name}\tU8\t{t.shape[0]}\t{hashlib.sha256(DATA[t.offset : t.offset + t.length]).hexdigest()}\n"
        for t in sorted(MANIFEST.tensors, key=lambda tensor: tensor.name)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.fixture
def staging() -> Iterator[Staging]:
    """Of a push that has no bytes yet."""
    staging = Staging("p1", MANIFEST, Arena.allocate(MANIFEST.total_bytes))
    yield staging
    staging.close()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that were hashed so far, a group of two at a time."""
    names: list[str] = []

    def noted(tensor: TensorSpec, view: Callable[[int, int], memoryview]) -> str:
        names.append(tensor.name)
        return tensor_digest(tensor, view)

    monkeypatch.setattr(contents, "tensor_digest", noted)
    monkeypatch.setattr(contents, "AT_ONCE_BYTES", 2 * LENGTH)
    return names


def write(staging: Staging, arrived: Change, start: int, end: int) -> None:
    """These bytes arrive."""
    staging.write(start, DATA[start:end], None)
    arrived.notify()


@pytest.mark.parametrize("num_threads", [1, 3])
async def test_each_tensor_is_hashed_when_it_is_there(
    staging: Staging, hashed: list[str], monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """Not before, and once; what comes out of order waits for what precedes it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4 * num_threads)))
    arrived = Change()
    digest = Contents(staging, arrived).begin()
    await until(lambda: bool(hashed))
    await nothing_runs()
    assert hashed == ["empty"]
    write(staging, arrived, 0, 5 * LENGTH - 1)
    await until(lambda: len(hashed) == 5)
    write(staging, arrived, 7 * LENGTH, NUM_TENSORS * LENGTH)
    await nothing_runs()
    assert sorted(hashed) == sorted(["empty", *(spec.name for spec in SPECS[:4])])
    assert not digest.done()
    write(staging, arrived, 5 * LENGTH - 1, 7 * LENGTH)
    assert await asyncio.wait_for(digest, STEP_S) == expected()
    assert sorted(hashed) == sorted(spec.name for spec in MANIFEST.tensors)


@pytest.mark.parametrize(("num_cores", "hashes_meanwhile"), [(1, False), (3, False), (4, True)])
async def test_where_there_are_few_cores_nothing_is_hashed_before_the_last_byte(
    staging: Staging, hashed: list[str], monkeypatch: pytest.MonkeyPatch, num_cores: int, hashes_meanwhile: bool
) -> None:
    """The streams that bring the bytes need them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    arrived = Change()
    write(staging, arrived, 0, MANIFEST.total_bytes - 1)
    digest = Contents(staging, arrived).begin()
    if hashes_meanwhile:
        await until(lambda: len(hashed) == len(MANIFEST.tensors) - 1)
    await nothing_runs()
    assert bool(hashed) == hashes_meanwhile
    write(staging, arrived, MANIFEST.total_bytes - 1, MANIFEST.total_bytes)
    assert await asyncio.wait_for(digest, STEP_S) == expected()


async def test_one_that_begins_late_has_the_same(staging: Staging) -> None:
    """When every byte is there; whoever asks again gets the same task."""
    write(staging, Change(), 0, MANIFEST.total_bytes)
    late = Contents(staging, Change())
    assert await late.begin() == expected()
    assert late.begin() is late.begin()


async def test_what_is_dropped_meanwhile_ends_without_a_word(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are freed while a thread reads them."""
    at_work, go_on, has_read = threading.Event(), threading.Event(), threading.Event()

    def slow(tensor: TensorSpec, view: Callable[[int, int], memoryview]) -> str:
        at_work.set()
        go_on.wait(STEP_S)
        try:
            return tensor_digest(tensor, view)
        finally:
            has_read.set()

    said: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: said.append(context))
    monkeypatch.setattr(contents, "tensor_digest", slow)
    arrived = Change()
    dropped = Contents(staging, arrived)
    digest = dropped.begin()
    write(staging, arrived, 0, MANIFEST.total_bytes)
    await asyncio.to_thread(at_work.wait, STEP_S)
    dropped.end()
    staging.close()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await digest
    assert await asyncio.to_thread(has_read.wait, STEP_S)
    await asyncio.to_thread(lambda: None)
    del digest, dropped
    gc.collect()
    loop.set_exception_handler(None)
    assert said == []


async def test_a_failure_is_not_the_last_word(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks again gets another try."""
    write(staging, Change(), 0, MANIFEST.total_bytes)
    again = Contents(staging, Change())
    with monkeypatch.context() as patched:
        patched.setattr(contents, "tensor_digest", None)
        with pytest.raises(TypeError):
            await again.begin()
    assert await again.begin() == expected()


async def test_the_event_loop_takes_few_tensors_at_once(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push may have 100,000: what is done for all of them together is done in threads."""
    sizes: list[int] = []
    to_thread = asyncio.to_thread

    async def noted(work: Callable[[Sequence[Any]], Any], tensors: Sequence[Any]) -> Any:
        sizes.append(len(tensors))
        return await to_thread(work, tensors)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    monkeypatch.setattr(contents, "AT_ONCE_TENSORS", 4)
    write(staging, Change(), 0, MANIFEST.total_bytes)
    assert await Contents(staging, Change()).begin() == expected()
    ordered, *hashed, together = sizes
    assert ordered == together == len(MANIFEST.tensors)
    assert (max(hashed), sum(hashed)) == (4, len(MANIFEST.tensors))


async def test_large_tensors_are_hashed_by_several_threads(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although all of them are there at once: what is large for a turn of a thread is not hashed together."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(contents, "AT_ONCE_BYTES", 2 * LENGTH)
    at_work, are_two = set[int](), threading.Event()

    def meeting(tensor: TensorSpec, view: Callable[[int, int], memoryview]) -> str:
        at_work.add(threading.get_ident())
        if len(at_work) == 2:
            are_two.set()
        assert are_two.wait(STEP_S), "one thread hashes everything"
        return tensor_digest(tensor, view)

    monkeypatch.setattr(contents, "tensor_digest", meeting)
    write(staging, Change(), 0, MANIFEST.total_bytes)
    assert await Contents(staging, Change()).begin() == expected()


@pytest.mark.parametrize("at_once_bytes", [1, 3, 64])
async def test_tensors_without_bytes_are_hashed_wherever_they_lie(
    monkeypatch: pytest.MonkeyPatch, at_once_bytes: int
) -> None:
    """Before, between and after others, alone or with them."""
    monkeypatch.setattr(contents, "AT_ONCE_BYTES", at_once_bytes)
    places = [(0, 0), (0, 3), (3, 0), (3, 0), (3, 1), (4, 9), (13, 0)]
    specs = [TensorSpec(f"t{n}", "U8", (length,), offset, length) for n, (offset, length) in enumerate(places)]
    staging = Staging("p1", Manifest(tuple(specs[::2] + specs[1::2]), 13), Arena.allocate(13))
    write(staging, Change(), 0, 13)
    lines = [f"{t.name}\tU8\t{t.length}\t{hashlib.sha256(DATA[t.offset :][: t.length]).hexdigest()}\n" for t in specs]
    assert await Contents(staging, Change()).begin() == hashlib.sha256("".join(lines).encode()).hexdigest()
    staging.close()
