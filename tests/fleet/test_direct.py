"""A client that calls the replicas of a fleet itself: where its requests go, and what it promises."""

import asyncio
import gc
import weakref
from dataclasses import replace

import grpc.aio
import pytest

from genserve.client import AsyncClient, Client, ClientClosedError
from genserve.client.direct.replica import DirectUpstream
from genserve.engine.generation import FinishReason
from genserve.errors import (
    DeadlineError,
    LoraNotFoundError,
    NoReplicaError,
    QueueFullError,
    ReplicaLostError,
    UnavailableError,
    UnsupportedError,
    WeightVersionMismatchError,
)
from genserve.routing.replica import ReplicaState
from genserve.v1 import fleet_pb2
from tests.fleet.direct_fleet import DIRECT, QUIET, DirectClient, direct_fleet
from tests.fleet.routers import replica, routed
from tests.fleet.scripted_fleet import tokens
from tests.fleet.talking_engine import continued, let_talk
from tests.support.patience import STEP_S, turns, until
from tests.support.pulled_peers import weights
from tests.support.refusals import refuses

READY, GONE = ReplicaState.READY, None


def is_closed(upstream: DirectUpstream) -> bool:
    """Whether the connection to a replica has ended: gRPC takes no more calls then."""
    try:
        upstream.generate(b"", 0.1).cancel()
    except grpc.aio.UsageError:
        return True
    return False


async def test_requests_go_straight_to_the_replicas() -> None:
    """Spread by the policies of the client; the router has not one of them. Everything else goes to the router."""
    async with direct_fleet(direct=QUIET) as fleet:
        for daemon in fleet.daemons:
            let_talk(daemon.engine, 0)
        prompts = [[number, 7] for number in range(30)]
        generations = await asyncio.gather(
            *(fleet.client.generate(prompt, max_tokens=20, text=False) for prompt in prompts)
        )
        assert [each.token_ids for each in generations] == [continued(prompt, 20) for prompt in prompts]
        assert fleet.num_submitted == [10, 10, 10]
        assert sum((await fleet.client.list_replicas()).decisions.values()) == 0
        assert (await fleet.client.status()).load.running == 9, "of all replicas"
        assert all(each.inflight == 0 for each in fleet.known.replicas())


async def test_a_blocking_client_calls_replicas_too() -> None:
    """In a thread of its own."""
    async with direct_fleet(2) as fleet:
        for daemon in fleet.daemons:
            let_talk(daemon.engine, 0)

        def roll_out() -> list[list[int]]:
            with Client(fleet.router_link.address, direct=QUIET) as client:
                client.wait_ready(20)
                return [each.token_ids for each in client.generate_many([[1], [2]], max_tokens=5, text=False)]

        assert await asyncio.to_thread(roll_out) == [continued([1], 5), continued([2], 5)]
        assert fleet.num_submitted == [1, 1]


async def test_a_replica_that_dies_before_the_first_token_is_done_without() -> None:
    """Another one does the request from its beginning."""
    async with direct_fleet() as fleet:
        generating = asyncio.create_task(fleet.client.generate([1], request_id="a", max_tokens=1))
        number, stream = await fleet.running("a")
        fleet.links[number].kill()
        other, again = await fleet.running("a", stream)
        assert other != number
        again.put(tokens([5], prompt=1, finish=FinishReason.LENGTH))
        assert (await generating).token_ids == [5]


async def test_a_replica_that_dies_in_an_answer_is_named() -> None:
    """With the number of tokens that were delivered."""
    async with direct_fleet() as fleet:
        stream = fleet.client.stream([1], request_id="a")
        reading = asyncio.create_task(anext(stream))
        number, engine = await fleet.running("a")
        engine.put(tokens([5, 6], prompt=1))
        assert (await reading).outputs[0].token_ids == [5, 6]
        fleet.links[number].kill()
        with pytest.raises(ReplicaLostError) as raised:
            await anext(stream)
        assert raised.value.metadata == {"replica": fleet.links[number].address, "num_tokens": "2"}


@pytest.mark.parametrize("prompt", [[1, 2], "ab"], ids=["token ids", "text"])
async def test_an_answer_can_go_on_elsewhere(prompt: list[int] | str) -> None:
    """From the prompt and what was delivered. The ids of a text are asked of a replica."""
    async with direct_fleet() as fleet:
        stream = fleet.client.stream(prompt, request_id="a", resume=True, text=False, max_tokens=4)
        reading = asyncio.create_task(anext(stream))
        number, engine = await fleet.running("a")
        engine.put(tokens([5, 6], prompt=2))
        assert (await reading).outputs[0].token_ids == [5, 6]
        fleet.links[number].kill()
        number, again = await fleet.running("a", engine)
        request = fleet.daemons[number].engine.requests[-1]
        assert list(request.prompt.ids) == ([1, 2] if prompt != "ab" else [0, *b"ab"]) + [5, 6]  # type: ignore[union-attr]
        assert request.stop.max_tokens == 2
        again.put(tokens([7, 8], version=1, prompt=4, finish=FinishReason.LENGTH))
        last = await anext(stream)
        assert last.outputs[0].finish is not None
        assert last.outputs[0].finish.weight_spans == [(0, 0, 2, 0), (1, 2, 4, 0)]
        assert [each async for each in stream] == []


async def test_a_replica_that_is_drained_gets_no_new_requests() -> None:
    """Those that run there go on, also when the router, which does not know of them, has removed it."""
    async with direct_fleet(2) as fleet:
        generating = asyncio.create_task(fleet.client.generate([1], request_id="a"))
        number, engine = await fleet.running("a")
        upstream = fleet.known.upstream_at(fleet.links[number].address)
        await fleet.client.drain_replica(fleet.links[number].address)
        await fleet.until_known(*(GONE if each == number else READY for each in range(2)))
        for daemon in fleet.daemons:
            let_talk(daemon.engine, 0)
        before = fleet.num_submitted[number]
        await asyncio.gather(*(fleet.client.generate([each], max_tokens=1, text=False) for each in range(10)))
        assert fleet.num_submitted[number] == before
        assert not is_closed(upstream)
        engine.put(tokens([5], prompt=1, finish=FinishReason.EOS))
        assert (await generating).token_ids == [5]
        await until(lambda: is_closed(upstream))


async def test_a_request_for_a_new_version_waits_for_no_report() -> None:
    """A client that has not heard of a push asks the router, and knows then. A version that is not there is refused, as
    a daemon does."""
    async with direct_fleet(2, replace(DIRECT, report_interval_s=10.0)) as fleet:
        for daemon in fleet.daemons:
            let_talk(daemon.engine, 0)
        await fleet.client.generate([1], max_tokens=1, text=False)
        async with AsyncClient(fleet.routed.running.address) as trainer:
            await trainer.push_weights(weights(3), version=3, timeout_s=30)
        await until(lambda: fleet.known.committed_version == 3)
        replicas = [fleet.known.upstream_at(each.address).known.told for each in fleet.links]
        fleet.known.tell(fleet_pb2.WatchReplicasResponse(weight_version=0, replicas=replicas), 0)  # as before the push
        await fleet.client.generate([1], max_tokens=1, text=False, min_weight_version=3)
        assert fleet.known.committed_version == 3
        with pytest.raises(WeightVersionMismatchError):
            await fleet.client.generate([1], max_tokens=1, text=False, min_weight_version=4)


@pytest.mark.slow
@pytest.mark.parametrize("many", [False, True], ids=["Generate", "GenerateMany"])
async def test_a_replica_that_lags_refuses_and_another_one_serves(*, many: bool) -> None:
    """It has restarted with its checkpoint, and neither the router nor the client has noticed."""
    async with direct_fleet(2) as fleet:
        await fleet.client.push_weights(weights(3), version=3, timeout_s=30)
        for daemon in fleet.daemons:
            let_talk(daemon.engine, 3)
        await fleet.client.generate([1], max_tokens=1, text=False)
        await fleet.until_known(READY, READY)
        fleet.blind_router()
        fleet.daemons[0].engine.weight_version = 0
        before = fleet.num_submitted
        if many:
            await fleet.client.generate_many([[each] for each in range(10)], max_tokens=1, text=False)
        else:
            await asyncio.gather(*(fleet.client.generate([each], max_tokens=1, text=False) for each in range(10)))
        assert fleet.num_submitted == [before[0], before[1] + 10]
        assert fleet.state(0) is not READY
        fleet.daemons[0].engine.weight_version = 3
        await fleet.until_known(READY, READY)


@pytest.mark.slow
async def test_a_push_changes_the_version_of_the_next_request() -> None:
    """Nobody gets less than what was told last."""
    async with direct_fleet() as fleet:
        for version in (1, 2):
            await fleet.client.push_weights(weights(version), version=version, timeout_s=30)
            for daemon in fleet.daemons:
                let_talk(daemon.engine, version)
            generation = await fleet.client.generate([1], max_tokens=1, text=False, min_weight_version=version)
            assert generation.sequences[0].weight_spans == [(version, 0, 1, 0)]


async def test_a_full_replica_and_one_without_the_adapter_are_done_without() -> None:
    """The router does not tell who has which adapter. If all say the same, that is the answer."""
    async with direct_fleet(2) as fleet:
        let_talk(fleet.daemons[1].engine, 0)
        for error in (QueueFullError("full"), LoraNotFoundError("none")):
            fleet.daemons[0].engine.refusal = error
            for _ in range(3):
                await fleet.client.generate([1], max_tokens=1, text=False, timeout_s=20)
        async with direct_fleet(1) as other:
            other.daemons[0].engine.refusal = LoraNotFoundError("none")
            with pytest.raises(LoraNotFoundError):
                await other.client.generate([1], lora_name="l", timeout_s=20)


async def test_cancelling_ends_the_request_in_the_replica() -> None:
    """As with a plain client: a call that is cancelled, a stream that is closed, one that is dropped."""
    async with direct_fleet(1) as fleet:
        generating = asyncio.create_task(fleet.client.generate([1], request_id="a"))
        _, engine = await fleet.running("a")
        generating.cancel()
        await until(engine.closed.is_set)
        for request_id, drops in (("b", False), ("c", True)):
            stream = fleet.client.stream([1], request_id=request_id)
            _, engine = await fleet.running(request_id)
            if drops:
                del stream
                gc.collect()
            else:
                await stream.aclose()
            await until(engine.closed.is_set)
        assert fleet.known.replicas()[0].inflight == 0


async def test_requests_are_ended_by_their_ids() -> None:
    """Wherever they are: in a replica, or waiting for one."""
    async with direct_fleet(1) as fleet:
        generating = asyncio.create_task(fleet.client.generate([1], request_id="a", max_tokens=2))
        await fleet.running("a")
        assert (await fleet.client.abort(["a"])).aborted_ids == ["a"]
        generating.cancel()
        fleet.links[0].kill()
        await until(lambda: fleet.state(0) is not READY)
        waiting = asyncio.create_task(fleet.client.generate([1], request_id="w"))
        await turns()
        answer = await fleet.client.abort(["w", "nobody"])
        assert (answer.aborted_ids, answer.unknown_ids) == (["w"], ["nobody"])
        assert (await waiting).sequences[0].finish_reason == "aborted"


async def test_no_ready_replica_and_the_deadline_are_reported() -> None:
    """As by a router."""
    async with direct_fleet(1, replace(DIRECT, wait_ready_s=0.3)) as fleet:
        for timeout_s in (0.5, 5.0, 25.0):  # a busy machine may take longer to bring it there
            with pytest.raises(DeadlineError):
                await fleet.client.generate([1], timeout_s=timeout_s)
            if fleet.daemons[0].engine.streams:
                break
        await until(fleet.daemons[0].engine.streams[0].closed.is_set)
        fleet.links[0].kill()
        with pytest.raises(NoReplicaError):
            await fleet.client.generate([1], max_tokens=1, text=False)


async def test_a_client_that_is_closed_says_so() -> None:
    """To whoever waits for tokens."""
    async with direct_fleet(1) as fleet:
        stream = fleet.client.stream([1], request_id="a")
        many = fleet.client.stream_many()
        await many.submit([1], request_id="b")
        reading = asyncio.create_task(anext(stream)), asyncio.create_task(anext(many))
        await fleet.running("a")
        await fleet.running("b")
        await fleet.client.close()
        for each in reading:
            with pytest.raises(ClientClosedError):
                await each
        with pytest.raises(ClientClosedError):
            await fleet.client.generate([1])
        with pytest.raises(ClientClosedError):
            await many.submit([1])


async def test_closing_a_client_raises_in_calls_that_wait() -> None:
    """For a replica, or for the router: no call to any of them runs."""
    async with direct_fleet(1) as fleet:
        fleet.links[0].kill()
        await until(lambda: not fleet.routed.running.router.fleet.ready)
        waiting = asyncio.create_task(fleet.client.generate([1]))
        await until(lambda: fleet.known.is_known)
        await turns()
        await fleet.client.close()
        with pytest.raises(ClientClosedError):
            await asyncio.wait_for(waiting, STEP_S)


async def test_the_deadline_holds_while_the_router_is_silent() -> None:
    """And before a replica is known."""
    async with direct_fleet(1) as fleet:
        fleet.router_link.silence()
        with pytest.raises(DeadlineError):
            await asyncio.wait_for(fleet.client.generate([1], timeout_s=0.3), STEP_S)


async def test_a_client_that_is_dropped_watches_no_more() -> None:
    """Nobody has to close it."""
    async with direct_fleet(1) as fleet:
        let_talk(fleet.daemons[0].engine, 0)
        client = DirectClient(fleet.router_link.address, direct=DIRECT)
        await client.generate([1], max_tokens=1, text=False)
        known = weakref.ref(client.replicas)
        del client

        def is_gone() -> bool:
            gc.collect()
            return known() is None

        await until(is_gone)


async def test_streams_go_on_when_their_client_is_dropped() -> None:
    """They need the router, too: to know of the replicas, and of another one when theirs is lost."""
    async with direct_fleet(1) as fleet:
        let_talk(fleet.daemons[0].engine, 0)
        stream = AsyncClient(fleet.router_link.address, direct=DIRECT).stream([1], max_tokens=1, timeout_s=STEP_S)
        many = AsyncClient(fleet.router_link.address, direct=DIRECT).stream_many(timeout_s=STEP_S)
        gc.collect()
        await many.submit([1], max_tokens=1)
        await many.done()
        assert [delta.is_last async for delta in stream] and [item.error async for item in many] == [None]


async def test_connections_are_closed_when_replicas_go() -> None:
    """And opened when they come."""
    async with direct_fleet(1) as fleet, replica() as other:
        let_talk(fleet.daemons[0].engine, 0)
        let_talk(other.engine, 0)
        await fleet.client.generate([1], max_tokens=1, text=False)
        await fleet.client.add_replica(other.address)
        await fleet.routed.until_ready(2)
        await until(lambda: [each.state for each in fleet.known.replicas()] == [READY, READY])
        upstream = fleet.known.upstream_at(other.address)
        await fleet.client.remove_replica(other.address)
        await until(lambda: is_closed(upstream))


async def test_only_a_router_tells_of_replicas() -> None:
    """A daemon has no such call, and where nobody listens nobody answers: at once, as with a plain client."""
    async with routed(1) as fleet:
        async with AsyncClient(fleet.daemons[0].address, direct=True) as client:
            with refuses(UnsupportedError, says="genserve route"):
                await client.generate([1])
        async with AsyncClient("127.0.0.1:1", direct=True) as client:
            with refuses(UnavailableError, says="127.0.0.1:1"):
                await client.generate([1])
