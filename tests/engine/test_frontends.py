"""Several processes that serve requests of one engine, on real vLLM. One daemon with three of them for all tests, which
is killed at the end. tests/engine/test_lifecycle.py drains one, and kills the engine of one."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import psutil
import pytest

from genserve.client import AsyncClient, PauseMode, PauseResult
from genserve.errors import DeadlineError, GenserveError, UnavailableError, WeightVersionMismatchError
from tests.engine.outputs import greedy_outputs, next_version, wait_idle
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.frontends import FOREVER, PortClient, everywhere_of, frontends_of, on_port, reasons, running
from tests.support.interrupted import computed_before, settled
from tests.support.labelled_streams import TOLERANCE, LiveStreams, behind, labels_of
from tests.support.patience import SCALE, until

NUM_FRONTENDS = 3
MAX_NUM_SEQS = 16


@pytest.fixture(scope="module")
def many(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with three front ends."""
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--max-num-seqs", str(MAX_NUM_SEQS)]
    process = DaemonProcess(
        [*flags, "--frontends", str(NUM_FRONTENDS)], tmp_path_factory.mktemp("frontends") / "stderr"
    )
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture(scope="module")
async def client(many: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client that knows the front ends."""
    async with AsyncClient(many.address) as connected:
        await connected.wait_ready()
        yield connected


@pytest.fixture(scope="module")
async def everywhere(many: DaemonProcess) -> AsyncIterator[Sequence[PortClient]]:
    """A client of the daemon's own port, and one of each front end, none of which knows of the others."""
    async with everywhere_of(many.address, NUM_FRONTENDS) as clients:
        yield clients


@asynccontextmanager
async def paused(client: AsyncClient, mode: PauseMode) -> AsyncIterator[PauseResult]:
    """A pause, with what it did to requests."""
    pause = await client.pause(mode, holder="test", timeout_s=60)
    try:
        yield pause
    finally:
        await client.resume(pause.lease.lease_id)


async def test_every_port_gives_the_same_tokens_and_says_what_it_serves(everywhere: Sequence[PortClient]) -> None:
    """One engine behind all of them. A front end has health, and tokenizes; it serves no other service."""
    outputs = [await greedy_outputs(each) for each in everywhere]
    assert all(each == outputs[0] for each in outputs)
    assert len({tuple(await each.tokenize("Once upon a time")) for each in everywhere}) == 1
    for each in everywhere[1:]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{each.port}") as channel:
            check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"", timeout=60) == b"\x08\x01"
        with pytest.raises(GenserveError):
            await each.status()


async def test_the_client_spreads_its_calls(
    many: DaemonProcess, client: AsyncClient, everywhere: Sequence[PortClient]
) -> None:
    """Every front end has some of the streams."""
    processes = frontends_of(many, everywhere[1:])
    before = {each.pid: sum(each.cpu_times()[:2]) for each in processes}
    served = [await client.generate([1, 2], max_tokens=64, ignore_eos=True, stream_interval=1) for _ in range(9)]
    assert all(len(each.token_ids) == 64 for each in served)
    worked = [sum(each.cpu_times()[:2]) - before[each.pid] for each in processes]
    assert len(worked) == NUM_FRONTENDS and min(worked) > 0


async def test_the_first_call_says_where_the_front_ends_are(many: DaemonProcess) -> None:
    """The daemon serves it."""
    async with AsyncClient(many.address) as fresh:
        ports = (await fresh.server_info()).frontend_ports
        before = connections_to(ports)
        assert len((await fresh.generate([1], max_tokens=1, ignore_eos=True)).token_ids) == 1
        await until(lambda: all(connections_to(ports)[port] > before[port] for port in ports))


def connections_to(ports: Sequence[int]) -> Counter[int]:
    """How many this process has to each of these ports."""
    called = [each.raddr.port for each in psutil.Process().net_connections("tcp") if each.raddr]
    return Counter(port for port in called if port in ports)


async def test_the_status_counts_the_requests_of_all(client: AsyncClient, everywhere: Sequence[PortClient]) -> None:
    """Also their tokens; none is left when they have gone."""
    async with running(everywhere):
        async with asyncio.timeout(60):
            while (status := await client.status()).load.running < len(everywhere):
                await asyncio.sleep(0.01)
        assert status.load.running == len(everywhere)
        assert status.state.running_requests + status.state.waiting_requests == len(everywhere)
        assert status.load.tokens_per_second > 0
    await wait_idle(client, timeout_s=30)


async def test_an_abort_at_any_port_reaches_requests_of_all(
    client: AsyncClient, everywhere: Sequence[PortClient]
) -> None:
    """By id, from a front end; and all, from the daemon."""
    async with running(everywhere) as tasks:
        result = await everywhere[2].abort(["r0", "r1", "nobody's"])
        assert (sorted(result.aborted_ids), result.unknown_ids) == (["r0", "r1"], ["nobody's"])
        assert await reasons(tasks[:2]) == ["aborted", "aborted"]
        assert sorted((await client.abort(all=True)).aborted_ids) == ["r2", "r3"]
        assert await reasons(tasks) == ["aborted"] * len(everywhere)


@pytest.mark.parametrize(
    ("mode", "num_kept", "num_aborted", "reason"),
    [("keep", 4, 0, "aborted"), ("abort", 0, 4, "paused"), ("wait", 0, 0, "length")],
)
async def test_a_pause_holds_for_the_requests_of_all(
    client: AsyncClient,
    everywhere: Sequence[PortClient],
    mode: PauseMode,
    num_kept: int,
    num_aborted: int,
    reason: str,
) -> None:
    """KEEP freezes them, ABORT ends them as PAUSED, WAIT lets them end. A request that comes meanwhile waits."""
    async with running(everywhere, max_tokens=100 if mode == "wait" else FOREVER) as tasks:
        async with paused(client, mode) as pause:
            assert (pause.requests_kept, pause.requests_aborted) == (num_kept, num_aborted)
            waiting = asyncio.create_task(everywhere[1].generate([5], max_tokens=2, ignore_eos=True))
            if mode != "keep":
                assert await reasons(tasks) == [reason] * len(everywhere)
            while (await client.status()).load.running + (await client.status()).load.waiting < num_kept + 1:
                await asyncio.sleep(0.01)
            assert not waiting.done()
        assert len((await asyncio.wait_for(waiting, 60)).token_ids) == 2
        if mode == "keep":
            assert len((await client.abort(all=True)).aborted_ids) == len(everywhere)
            assert await reasons(tasks) == [reason] * len(everywhere)


async def test_every_port_names_the_holder_of_a_pause(client: AsyncClient, everywhere: Sequence[PortClient]) -> None:
    """To a request whose time is over: the daemon alone has the leases."""
    async with client.paused(holder="alice@host", ttl_s=600):
        waiting = [each.generate([1], max_tokens=1, timeout_s=3.0 * SCALE) for each in everywhere]
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, DeadlineError), error
            assert "paused by alice@host, " in error.message
            assert error.metadata["holder"] == "alice@host"


async def test_pushes_into_streams_of_all_front_ends_label_every_token(
    client: AsyncClient, checkpoints: dict[str, Path]
) -> None:
    """KEEP: spans monotone, contiguous and exact, as in tests/faults/test_streams.py. Who has the answer of a push
    finds its version at every front end."""
    num_streams = 12
    version = await next_version(client)
    names = {version - 1: "a", version: "b", version + 1: "a"}
    async with LiveStreams.running(client, num_streams) as live:
        for pushed in (version, version + 1):
            await live.gained(50)
            applied = (await client.push_weights(checkpoints[names[pushed]], version=pushed)).applied
            assert applied is not None and applied.requests_kept == num_streams
            for _ in range(NUM_FRONTENDS):
                await client.generate([1], max_tokens=1, min_weight_version=pushed)
                with pytest.raises(WeightVersionMismatchError):
                    await client.generate([1], max_tokens=1, min_weight_version=pushed + 1)
        await live.gained(50)
        streams = await live.end()
    for stream in streams:
        assert stream.labels == sorted(stream.labels)
        assert set(stream.labels) == set(names), "the stream did not live across both pushes"
        finish = stream.sequence.finish
        assert finish is not None and labels_of(finish.weight_spans) == stream.labels
    for pushed, name in ((version + 2, "b"), (version + 3, "a")):
        await client.push_weights(checkpoints[name], version=pushed)
        own: list[float] = []
        foreign: list[float] = []
        for stream in streams[::3]:
            for distance, label in zip(await behind(client, stream, f"{pushed}"), stream.labels, strict=True):
                (own if names[label] == name else foreign).append(distance)
        assert max(own) < TOLERANCE, "a token is not the likeliest one of the version it is labelled with"
        assert sum(distance > TOLERANCE for distance in foreign) > 0.5 * len(foreign), "the control tells nothing"


async def test_a_push_tells_what_it_costs_the_streams_of_all(
    client: AsyncClient, everywhere: Sequence[PortClient], checkpoints: dict[str, Path]
) -> None:
    """Tokens add up; and it is known when the streams of all have output again."""
    async with running(everywhere) as tasks:
        push = await client.push_weights(checkpoints["a"], version=await next_version(client))
        applied = await settled(client, push.push.push_id)
        await client.abort(all=True)
        answers = await asyncio.gather(*tasks)
    computed = sum(computed_before(applied.active_version, [0], answer) for answer in answers)
    assert applied.requests_kept == len(everywhere)
    assert applied.recomputed_tokens == computed
    assert applied.longest_wait_s is not None and applied.longest_wait_s > applied.step_s["commit"]
    async with running(everywhere) as tasks:
        async with client.paused(kv_policy="reuse") as lease:
            version = await next_version(client)
            push = await client.push_weights(checkpoints["a"], version=version, pause_lease_id=lease.lease_id)
        await client.abort(all=True)
        await asyncio.gather(*tasks)
    assert push.applied is not None and push.applied.recomputed_tokens, "it has not waited for the front ends"


async def test_a_killed_front_end_ends_its_own_streams_and_nothing_else(
    many: DaemonProcess, client: AsyncClient, everywhere: Sequence[PortClient]
) -> None:
    """Its requests end in the engine too: they would keep a new one waiting, for whom there is no room beside them.
    Another front end notices nothing. The next process serves on the same port."""
    victim, other = everywhere[1], everywhere[2]
    port = victim.port
    process = on_port(many, port)
    async with running([other]) as clock, running([victim] * (MAX_NUM_SEQS - 1)) as lost:
        waiting = asyncio.create_task(everywhere[3].generate([9], max_tokens=1, request_id="waits"))
        process.kill()
        for each in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(each, UnavailableError)
        assert len((await asyncio.wait_for(waiting, 60)).token_ids) == 1
        assert not clock[0].done(), "the requests of the one that died ran to their end"
        assert len((await client.generate([1, 2], max_tokens=3, ignore_eos=True)).token_ids) == 3
        async with asyncio.timeout(60):
            while (await client.status()).load.running > 1:
                await asyncio.sleep(0.01)
        assert (await client.abort(["r0"])).aborted_ids == ["r0"]
        assert await reasons(clock) == ["aborted"]
    await many.until_said(f"front end on port {port}: it was ended by SIGKILL; it is started again in 0.5 s")


async def test_a_pause_goes_on_without_a_front_end_that_stands_still(
    many: DaemonProcess, client: AsyncClient, everywhere: Sequence[PortClient]
) -> None:
    """It waits for the answer for a while, and then the front end is killed. The others answer."""
    victim = everywhere[3]
    process = on_port(many, victim.port)
    async with running([everywhere[0], everywhere[2]]) as tasks, paused(client, "keep"):
        process.suspend()
        async with paused(client, "abort") as pause:
            assert pause.requests_aborted == 2
        assert await reasons(tasks) == ["paused"] * 2
    _, alive = await asyncio.to_thread(psutil.wait_procs, [process], 90)
    assert not alive


async def test_front_ends_that_were_started_again_serve_as_before(
    client: AsyncClient, everywhere: Sequence[PortClient]
) -> None:
    """The two of the tests above, on the same ports; also after a push."""
    await asyncio.gather(*(each.wait_ready(timeout_s=120) for each in everywhere[1:]))
    assert (await client.server_info()).num_frontends_down == 0
    outputs = [await greedy_outputs(each) for each in everywhere]
    assert all(each == outputs[0] for each in outputs)
    version = (await client.get_weights()).weight_version
    for each in everywhere:
        generation = await each.generate([1], max_tokens=1, min_weight_version=version)
        assert [span.version for span in generation.sequences[0].weight_spans] == [version]


async def test_front_ends_end_with_a_daemon_that_is_killed(
    many: DaemonProcess, everywhere: Sequence[PortClient]
) -> None:
    """Nothing serves without its owner."""
    processes = frontends_of(many, everywhere[1:])
    assert len(processes) == NUM_FRONTENDS
    async with running(everywhere) as tasks:
        many.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(many.exit_status, 60)
        _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 90)
        assert not alive
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        lost = [each for each in ends if isinstance(each, BaseException)]  # on a busy machine some answers end before
        assert lost and all(isinstance(each, UnavailableError) for each in lost), ends
