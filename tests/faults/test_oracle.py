"""The oracle itself: what it is held against, and that each part of it can fail."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from genserve.client import AsyncClient
from genserve.errors import PushTruncatedError
from tests.support.faulty_worker import Fault
from tests.support.footprint import RESIDENT_ALLOWANCE_BYTES, Footprint
from tests.support.oracle import Oracle, OracleError
from tests.support.subject import Subject


async def finds_only(hasty: Oracle, name: str) -> None:
    """It finds that this differs, and nothing else when what is on its way has gone."""
    found: set[str] = set()
    async with asyncio.timeout(60):
        while found != {name}:
            with pytest.raises(OracleError) as raised:
                await hasty.holds((await hasty.served_version(), "a"))
            assert name in raised.value.findings
            found = set(raised.value.findings)


@pytest.fixture
def hasty(subject: Subject) -> Oracle:
    """The oracle, as one that does not wait for what will not go away."""
    return replace(subject.oracle, settle_timeout_s=0.5)


async def test_the_oracle_holds_when_nothing_has_happened(subject: Subject) -> None:
    """The control of the controls: the footprint is exact."""
    await subject.oracle.holds((await subject.oracle.served_version(), "a"))


async def test_the_oracle_notices_another_version(subject: Subject, hasty: Oracle) -> None:
    """A version that nobody expects, though its weights are right."""
    version = await hasty.served_version()
    with pytest.raises(OracleError) as raised:
        await hasty.holds((version + 1, "a"))
    assert raised.value.findings.keys() == {"version"}
    await subject.oracle.holds((version, "a"))


async def test_the_oracle_notices_a_new_label_on_old_weights(subject: Subject, hasty: Oracle) -> None:
    """The version is right and the weights are not: digests and outputs tell, each for itself."""
    version = await hasty.served_version()
    with pytest.raises(OracleError) as raised:
        await hasty.holds((version, "b"))
    assert raised.value.findings.keys() == {"committed", "digests", "outputs"}
    assert "of ['a']" in raised.value.findings["digests"]
    await subject.oracle.holds((version, "a"))


async def test_the_oracle_notices_a_push_that_is_still_staged(subject: Subject, hasty: Oracle) -> None:
    """One arena more than the two that take turns."""
    version = await hasty.served_version()
    await subject.push("b", action="stage", push_id="whole")
    raw = await subject.raw_push(ttl_s=60)
    with pytest.raises(PushTruncatedError):
        await raw.send(raw.frames((0, 1000)))
    with pytest.raises(OracleError) as raised:
        await hasty.holds((version, "a"))
    assert {"arenas", "arena_bytes"} <= raised.value.findings.keys()
    await subject.client.discard_push("whole")
    await subject.oracle.holds((version, "a"), settles=False)  # the next push takes the place of the other one


async def test_the_oracle_notices_a_call_that_goes_on(subject: Subject, hasty: Oracle) -> None:
    """A task of the daemon more."""
    version = await hasty.served_version()
    async with AsyncClient(subject.process.address) as other:
        watch = other.watch_status()
        await anext(watch)
        await finds_only(hasty, "tasks")
        await watch.aclose()
    await subject.oracle.holds((version, "a"))


async def test_the_oracle_notices_memory_that_a_worker_keeps(subject: Subject, hasty: Oracle) -> None:
    """More than it may, and without a name."""
    subject.order(Fault("digests", "leak"))
    await finds_only(hasty, "private_bytes")
    subject.release()
    await subject.oracle.holds((await hasty.served_version(), "a"))


async def test_the_oracle_notices_a_pause(subject: Subject, hasty: Oracle) -> None:
    """Whoever paused has to resume."""
    version = await hasty.served_version()
    async with subject.client.paused():
        with pytest.raises(OracleError) as raised:
            await hasty.holds((version, "a"))
    assert raised.value.findings.keys() == {"phase"}
    await subject.oracle.holds((version, "a"))


async def test_a_fault_that_did_not_happen_is_noticed(subject: Subject) -> None:
    """A test that ordered it would prove nothing."""
    subject.order(Fault("commit", after=10_000))
    await subject.push("b")
    assert subject.fired == 0
    with pytest.raises(AssertionError, match="never happened"):
        subject.release()
    await subject.oracle.holds((await subject.oracle.served_version(), "b"))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"processes": 4}, "processes"),
        ({"open_files": Counter({"socket:": 21})}, "open_files"),
        ({"worker_threads": 9}, "worker_threads"),
        ({"shared_files": frozenset({"psm_1", "psm_2"})}, "shared_files"),
        ({"tasks": Counter({"serve": 1})}, "tasks"),
        ({"tasks": Counter({"serve": 2, "push": 2})}, "tasks"),
        ({"private_bytes": RESIDENT_ALLOWANCE_BYTES + 1001}, "private_bytes"),
    ],
)
def test_a_footprint_tells_what_differs(change: dict[str, Any], name: str) -> None:
    """Also fewer than there were: then the baseline was none."""
    tasks = Counter({"serve": 2, "push": 1})
    baseline = Footprint(3, Counter({"socket:": 20}), 1, 4096, 1, 8, frozenset({"psm_1"}), tasks, 1000)
    assert replace(baseline, private_bytes=RESIDENT_ALLOWANCE_BYTES + 1000).beyond(baseline) == {}
    assert replace(baseline, **change).beyond(baseline).keys() == {name}


async def test_every_checkpoint_is_known_by_what_it_is(subject: Subject) -> None:
    """Tensors, packed linears included, differ between the two, so digests tell a mixture from either."""
    a, b = subject.oracle.known["a"], subject.oracle.known["b"]
    assert a.digests.keys() == b.digests.keys()
    changed = {
        name for _, name in a.digests if a.digests["dp0:pp0:pcp0:tp0", name] != b.digests["dp0:pp0:pcp0:tp0", name]
    }
    assert sum(name.endswith("cpu_linear") for name in changed) >= 8
    assert any("norm" in name for name in changed)
    assert a.outputs != b.outputs
    await subject.oracle.holds((await subject.oracle.served_version(), "a"))
