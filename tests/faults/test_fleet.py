"""Three real daemons behind a router: replicas and the router are killed, frozen and restarted."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from genserve.client import AsyncClient, Direct, Generation, WeightSpan
from genserve.errors import GenserveError, PushNotFoundError, ReplicaLostError
from tests.faults.fleet_processes import FleetProcesses
from tests.faults.fleet_states import all_ready, ready, until
from tests.support import models, patience
from tests.support.patience import slow

NUM_REPLICAS = 3
LONG = pytest.mark.long("genserve/fleet", "genserve/client", "genserve/routing")
PROMPT = [5, 6, 7]
NUM_ENDLESS = 1900
"""Tokens of a request that does not end by itself in a test."""


@pytest.fixture(scope="module")
def fleet(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcesses]:
    """Kept for all tests: each leaves all replicas ready."""
    flags = ["--silence", "5s", "--policy", "round-robin"]
    with FleetProcesses(checkpoints["a"], tmp_path_factory.mktemp("fleet"), NUM_REPLICAS, flags).running() as running:
        yield running


@pytest.fixture
async def client(fleet: FleetProcesses) -> AsyncIterator[AsyncClient]:
    """Of the router."""
    async with AsyncClient(fleet.router_address) as client:
        await until(client, all_ready)
        yield client


async def push(client: AsyncClient, checkpoint: Path) -> int:
    """The next version."""
    version = (await client.status()).state.weight_version + 1
    await client.push_weights(checkpoint, version=version, timeout_s=120)
    return version


async def serve_alike(fleet: FleetProcesses, version: int) -> None:
    """All daemons say the same of a prompt, under this version."""
    answers = []
    for address in fleet.addresses:
        async with AsyncClient(address) as client:
            assert (await client.status()).state.weight_version == version
            answers.append((await client.generate(PROMPT, max_tokens=12, ignore_eos=True, temperature=0)).token_ids)
    assert all(answer == answers[0] for answer in answers)


class Streamed:
    """An answer that comes token by token, and the spans of its finish. It ends when it has tokens of `enough`, a
    version, or by itself."""

    def __init__(self, client: AsyncClient, *, enough: int | None = None, **options: Any) -> None:
        self.tokens: list[int] = []
        self.versions: list[int] = []
        self.spans: list[WeightSpan] = []
        self.begun = asyncio.Event()
        self._enough = enough
        self.task = asyncio.create_task(self._read(client, options))

    async def _read(self, client: AsyncClient, options: dict[str, Any]) -> None:
        async with client.stream(PROMPT, ignore_eos=True, **options) as deltas:
            async for delta in deltas:
                for output in delta.outputs:
                    self.tokens += output.token_ids
                    self.versions += [span.version for span in output.weight_spans]
                    if output.finish is not None:
                        self.spans = output.finish.weight_spans
                self.begun.set()
                if self._enough in self.versions:
                    break


async def begun(streams: Sequence[Streamed]) -> None:
    """Waits until each has a token."""
    async with asyncio.timeout(90):
        for each in streams:
            waiting = asyncio.create_task(each.begun.wait())
            await asyncio.wait({each.task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if each.task.done():
                each.task.result()


def versions(generation: Generation) -> list[int]:
    """Of its spans."""
    return [span.version for span in generation.sequences[0].weight_spans]


async def test_a_push_reaches_all_while_they_serve(
    fleet: FleetProcesses, client: AsyncClient, checkpoints: dict[str, Path]
) -> None:
    """Streams go on, each under the old version and then the new one."""
    version = (await client.status()).state.weight_version + 1
    running = [Streamed(client, max_tokens=NUM_ENDLESS, enough=version) for _ in range(2 * NUM_REPLICAS)]
    await begun(running)
    assert [each.inflight for each in (await client.list_replicas()).replicas] == [2] * NUM_REPLICAS
    assert await push(client, checkpoints["b"]) == version
    after = await client.generate(PROMPT, max_tokens=4, ignore_eos=True)
    assert versions(after) == [version]
    for each in running:
        await each.task
        assert each.versions == sorted(each.versions) and set(each.versions) == {version - 1, version}
    await serve_alike(fleet, version)


async def test_a_replica_that_is_killed_ends_its_own_streams_only(
    fleet: FleetProcesses, client: AsyncClient, checkpoints: dict[str, Path]
) -> None:
    """When it is back with the base checkpoint, it serves nothing before it has fetched the version of the fleet."""
    version = await push(client, checkpoints["b"])
    streams = [Streamed(client, max_tokens=600) for _ in range(NUM_REPLICAS)]
    await begun(streams)
    assert [each.inflight for each in (await client.list_replicas()).replicas] == [1] * NUM_REPLICAS
    killed_s = time.monotonic()
    fleet.kill(1)
    await until(client, lambda replicas: fleet.addresses[1] not in ready(replicas))
    print(f"out of rotation after {time.monotonic() - killed_s:.2f} s")
    async with asyncio.timeout(120):
        outcomes = await asyncio.gather(*(each.task for each in streams), return_exceptions=True)
    print(f"all streams have ended after {time.monotonic() - killed_s:.2f} s")
    lost = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [type(each) for each in lost] == [ReplicaLostError], lost
    assert fleet.addresses[1] in str(lost[0])
    fleet.restart(1)
    seen: list[int] = []
    async with asyncio.timeout(240):
        while not all_ready(replicas := await client.list_replicas()):
            if any(each.state in ("connecting", "unhealthy") for each in replicas.replicas):
                # Workers wait for their next step without sleeping, for a second, on the core of the one that starts:
                # requests that never cease kept it from starting for minutes.
                await asyncio.sleep(0.1)
                continue
            seen += versions(await client.generate(PROMPT, max_tokens=4, ignore_eos=True))
    print(f"ready after {time.monotonic() - killed_s:.2f} s")
    assert set(seen) <= {version}
    await serve_alike(fleet, version)


async def test_streams_that_may_be_resumed_are(fleet: FleetProcesses, client: AsyncClient) -> None:
    """Elsewhere, from the tokens that were delivered; greedy tokens are those of a run that was not broken."""
    expected = (await client.generate(PROMPT, max_tokens=400, ignore_eos=True, temperature=0.0)).token_ids
    options: Any = {"max_tokens": 400, "temperature": 0.0, "text": False, "resume": True}
    running = [Streamed(client, **options) for _ in range(NUM_REPLICAS)]
    await begun(running)
    assert max(each.inflight for each in (await client.list_replicas()).replicas) <= 1  # so the one that dies has one
    fleet.kill(2)
    for each in running:
        await each.task
        assert each.tokens == expected
        assert (each.spans[0].start, each.spans[-1].end) == (0, 400)
    fleet.restart(2)
    await until(client, all_ready)


@LONG
async def test_a_direct_client_serves_through_a_push_and_a_kill(
    fleet: FleetProcesses, client: AsyncClient, checkpoints: dict[str, Path]
) -> None:
    """Its requests do not go through the router. They go on elsewhere when a replica dies, and none goes back to older
    weights, although the client hears of both a moment later than the router."""
    async with AsyncClient(fleet.router_address, direct=Direct(policies="round-robin")) as direct:
        await direct.wait_ready(60)
        decided = sum((await client.list_replicas()).decisions.values())
        seen: list[list[int]] = []

        async def roll_out() -> None:
            for _ in range(8):
                many = await direct.generate_many([PROMPT] * 8, max_tokens=60, ignore_eos=True, text=False, resume=True)
                seen.extend(map(versions, many))

        rolling = [asyncio.create_task(roll_out()) for _ in range(2)]
        version = await push(client, checkpoints["b"])
        after = await direct.generate_many([PROMPT] * 8, max_tokens=4, ignore_eos=True, min_weight_version=version)
        assert {each for generation in after for each in versions(generation)} == {version}
        fleet.kill(0)
        await asyncio.gather(*rolling)
        assert len(seen) == 2 * 8 * 8 and {each for told in seen for each in told} <= {version - 1, version}
        assert all(told == sorted(told) for told in seen)
        assert sum((await client.list_replicas()).decisions.values()) == decided
    fleet.restart(0)
    await until(client, all_ready)


@LONG  # the next one has this and a push
async def test_a_replica_that_freezes_is_out_after_its_silence(fleet: FleetProcesses, client: AsyncClient) -> None:
    """No connection breaks, and nothing but the watch tells."""
    fleet.signal(2, signal.SIGSTOP)
    try:
        await until(client, lambda replicas: fleet.addresses[2] not in ready(replicas))
        for _ in range(2 * NUM_REPLICAS):
            await client.generate(PROMPT, max_tokens=4, ignore_eos=True)
    finally:
        fleet.signal(2, signal.SIGCONT)
    await until(client, all_ready)


async def test_a_replica_that_misses_a_push_catches_up(
    fleet: FleetProcesses, client: AsyncClient, checkpoints: dict[str, Path]
) -> None:
    """It is away when the push comes, and is back with the old version."""
    fleet.signal(0, signal.SIGSTOP)
    try:
        await until(client, lambda replicas: fleet.addresses[0] not in ready(replicas))
        version = await push(client, checkpoints["a"])
    finally:
        fleet.signal(0, signal.SIGCONT)
    await until(client, all_ready)
    await serve_alike(fleet, version)


async def test_a_router_that_is_killed_between_the_phases(
    fleet: FleetProcesses, client: AsyncClient, checkpoints: dict[str, Path]
) -> None:
    """Nobody serves what was only prepared; the push that is repeated goes on where it was."""
    version = (await client.status()).state.weight_version
    await client.push_weights(
        checkpoints["b"], version=version + 1, push_id="between", attempt="a", action="prepare", timeout_s=120
    )
    fleet.restart_router()
    async with AsyncClient(fleet.router_address) as again:
        await until(again, all_ready)
        assert (await again.status()).state.weight_version == version
        await serve_alike(fleet, version)
        await again.push_weights(checkpoints["b"], version=version + 1, push_id="between", attempt="a", timeout_s=120)
        await until(again, all_ready)
    await serve_alike(fleet, version + 1)


async def test_what_a_killed_router_left_prepared_is_in_nobodys_way(
    fleet: FleetProcesses, client: AsyncClient, checkpoints: dict[str, Path]
) -> None:
    """A push under another id passes at once, and need not wait for the end of `prepared_ttl`."""
    version = (await client.status()).state.weight_version
    fleet.signal(2, signal.SIGSTOP)  # what others have prepared waits for it
    pushing = asyncio.create_task(
        client.push_weights(checkpoints["a"], version=version + 1, push_id="left", timeout_s=60)
    )
    async with asyncio.timeout(patience.STEP_S):
        while not await prepared(fleet, "left"):
            await asyncio.sleep(0.02)
    assert fleet.router is not None
    fleet.router.kill()
    pushing.cancel()
    await asyncio.gather(pushing, return_exceptions=True)
    fleet.signal(2, signal.SIGCONT)
    fleet.start_router()
    async with AsyncClient(fleet.router_address) as again:
        await until(again, all_ready)
        assert await prepared(fleet, "left")
        await again.push_weights(checkpoints["b"], version=version + 1, timeout_s=60)
        await until(again, all_ready)
    await serve_alike(fleet, version + 1)


async def prepared(fleet: FleetProcesses, push_id: str) -> list[str]:
    """Those of the first two daemons that hold a push which they were not told to commit."""
    found = []
    for address in fleet.addresses[:2]:
        async with AsyncClient(address) as replica:
            with suppress(PushNotFoundError):
                if (await replica.get_push(push_id)).push.state == "prepared":
                    found.append(address)
    return found


async def test_a_router_that_is_killed_while_some_have_committed(
    fleet: FleetProcesses, client: AsyncClient, checkpoints: dict[str, Path]
) -> None:
    """The version is committed: the next router brings it to all, also to those that stood still meanwhile."""
    version = (await client.status()).state.weight_version + 1
    await client.push_weights(
        checkpoints["a"], version=version, push_id="some", attempt="a", action="prepare", timeout_s=120
    )
    assert fleet.router is not None
    for frozen in (0, 1):
        fleet.signal(frozen, signal.SIGSTOP)
    try:
        committing = asyncio.create_task(client.commit_push("some", timeout_s=120))
        async with AsyncClient(fleet.addresses[2]) as replica:
            while (await replica.status()).state.weight_version != version:
                await slow(0.01)
        fleet.router.kill()
        with suppress(GenserveError):  # the replicas that stand still may have been given up
            await committing
    finally:
        for frozen in (0, 1):
            fleet.signal(frozen, signal.SIGCONT)
    fleet.start_router()
    async with AsyncClient(fleet.router_address) as again:
        await until(again, lambda replicas: all_ready(replicas) and replicas.weight_version == version)
    await serve_alike(fleet, version)


def test_the_checkpoints_differ(checkpoints: dict[str, Path]) -> None:
    """Otherwise nothing here could fail."""
    a, b = (models.load_tensors(checkpoints[name]) for name in "ab")
    assert any((a[name] != b[name]).any() for name in a)
