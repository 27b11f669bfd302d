"""torchrl's engine and balancer over a router and its replicas, and over one daemon."""

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from genserve.client import ClientClosedError
from genserve.engine.generation import FinishReason
from genserve.engine.types import Load
from genserve.errors import ManifestMismatchError, NoReplicaError, UnsupportedError
from genserve.integrations.torchrl import AsyncVLLM, ReplicaClients
from genserve.routing.replica import ReplicaState
from tests.fleet.routers import replica, routed
from tests.fleet.scripted_fleet import tokens
from tests.support.patience import STEP_S, until
from tests.support.pulled_peers import content
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon

T = TypeVar("T")
IDS = [1, 2, 3]


@asynccontextmanager
async def engine_of(target: str, **options: Any) -> AsyncIterator[AsyncVLLM]:
    """An engine of a router or a daemon."""
    engine = await asyncio.to_thread(lambda: AsyncVLLM(target, **options))
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.shutdown)


async def in_thread(call: Callable[..., T], *args: Any, **options: Any) -> T:
    """What a trainer gets from a method, with the daemons on the loop of the test."""
    return await asyncio.to_thread(lambda: call(*args, **options))


def tensors(version: int, names: str = "ab") -> list[tuple[str, torch.Tensor]]:
    """All or some of the weights of a version."""
    return [
        (name, torch.frombuffer(bytearray(data), dtype=torch.uint8))
        for name, data in content(version).items()
        if name in names
    ]


def num_clients() -> int:
    """How many blocking clients are open."""
    return [each.name for each in threading.enumerate()].count("genserve client")


async def answered(daemon: Daemon, ids: list[int]) -> None:
    """Ends the request that runs there with these tokens."""
    await until(lambda: bool(daemon.engine.streams))
    daemon.engine.streams.pop().put(tokens(ids, prompt=3, finish=FinishReason.LENGTH, with_logprobs=True))


@pytest.mark.slow
async def test_an_update_is_one_push_to_all_replicas() -> None:
    """Each is the version after the one that is served; no group is needed, and the metadata is the checkpoint's."""
    async with routed(3) as fleet, engine_of(fleet.running.address) as engine:
        await in_thread(engine.init_weight_update_group)
        metadata = await in_thread(engine.get_model_metadata)
        assert metadata == {name: (each.dtype, each.shape) for name, each in tensors(1)}
        for version in (1, 2):
            await in_thread(engine.update_weights, iter(tensors(version)))
            served = [(each.engine.weight_version, each.engine.live) for each in fleet.daemons]
            assert served == [(version, content(version))] * 3


async def test_update_lacking_tensors_changes_nothing_unless_parts_are_allowed() -> None:
    """As `push_weights_from_transformers_optimized` brings them."""
    async with routed(2) as fleet, engine_of(fleet.running.address) as engine:
        await in_thread(engine.update_weights, tensors(1))
        with refuses(ManifestMismatchError, field='header.manifest.tensors["b"]'):
            await in_thread(engine.update_weights, tensors(2, "a"))
        assert [each.engine.live for each in fleet.daemons] == [content(1)] * 2
        async with engine_of(fleet.running.address, partial=True) as parts:
            await in_thread(parts.update_weights, tensors(2, "a"))
        assert [each.engine.live for each in fleet.daemons] == [{**content(1), "a": content(2)["a"]}] * 2


async def test_a_prompt_goes_to_the_replica_that_is_asked_for() -> None:
    """By its place among the actors; the others get nothing."""
    async with routed(3) as fleet, engine_of(fleet.running.address) as engine:
        assert await in_thread(lambda: engine.actors) == [each.address for each in fleet.daemons]
        await in_thread(engine.update_weights, tensors(4))
        for index, daemon in enumerate(fleet.daemons):
            call = asyncio.create_task(in_thread(engine.generate, IDS, {"max_tokens": 2}, actor_index=index))
            await answered(daemon, [index, 9])
            answer: Any = await call
            assert answer.outputs[0].token_ids == [index, 9]
            assert daemon.engine.requests[-1].min_weight_version == 1
        assert [len(each.engine.requests) for each in fleet.daemons] == [1, 1, 1]
        with pytest.raises(IndexError, match="3"):
            await in_thread(engine.generate, IDS, actor_index=3)


async def test_clients_of_replicas_that_have_left_are_closed() -> None:
    """But for those with calls that run. A replica that is started again has another address."""
    async with routed(3) as fleet, engine_of(fleet.running.address) as engine:
        leaving, busy, staying = fleet.daemons

        async def ask(index: int, daemon: Daemon) -> None:
            call = asyncio.create_task(in_thread(engine.generate, IDS, actor_index=index))
            await answered(daemon, [1])
            await call

        for index, daemon in enumerate(fleet.daemons):
            await ask(index, daemon)
        num_open = num_clients()
        running = asyncio.create_task(in_thread(engine.generate, IDS, actor_index=1))
        await until(lambda: bool(busy.engine.streams))
        for each in (leaving, busy):
            await fleet.client.remove_replica(each.address)
        await ask(0, staying)
        await until(lambda: num_clients() == num_open - 1)
        await answered(busy, [7])
        answer: Any = await running
        assert answer.outputs[0].token_ids == [7]
        await ask(0, staying)
        await until(lambda: num_clients() == num_open - 2)
        await in_thread(engine.shutdown)
        await until(lambda: num_clients() == num_open - 4)
        with pytest.raises(ClientClosedError):
            await in_thread(engine.generate, IDS, actor_index=0)


def test_no_client_is_opened_after_the_end() -> None:
    """By a call that had begun before."""
    clients = ReplicaClients({})
    clients.close()
    with pytest.raises(ClientClosedError), clients.using("127.0.0.1:1", ["127.0.0.1:1"]):
        pass


async def test_a_replica_that_is_not_ready_is_not_asked() -> None:
    """Not by its index, and the balancer does not select it."""
    async with routed(2) as fleet, engine_of(fleet.running.address) as engine:
        balancer = engine.create_load_balancer("round-robin")
        assert {await in_thread(balancer.select_actor, IDS) for _ in range(4)} == {0, 1}
        leaving = fleet.daemons[0]
        running: list[asyncio.Task[object]] = []
        while not all(each.engine.streams for each in fleet.daemons):  # a report may come between two, and make a tie
            running.append(asyncio.create_task(in_thread(engine.generate, IDS)))
            await until(lambda: sum(len(each.engine.streams) for each in fleet.daemons) == len(running))
        drained = asyncio.create_task(fleet.client.drain_replica(leaving.address))
        await until(lambda: fleet.state(leaving) is ReplicaState.DRAINING)
        assert {await in_thread(balancer.select_actor, IDS) for _ in range(4)} == {1}
        with refuses(NoReplicaError, says="draining"):
            await in_thread(engine.generate, IDS, actor_index=0)
        for each in fleet.daemons:
            while each.engine.streams:
                await answered(each, [4])
        await asyncio.gather(*running, drained)
        assert await in_thread(lambda: engine.actors) == [fleet.daemons[1].address]


async def test_answers_keep_the_order_of_their_prompts() -> None:
    """Whichever ends first, and wherever it ran. A single prompt has a single answer."""
    async with routed(1) as fleet, engine_of(fleet.running.address) as engine:
        (daemon,) = fleet.daemons
        prompts = [{"prompt_token_ids": [7]}, "text"]
        call = asyncio.create_task(in_thread(engine.generate, prompts, {"logprobs": 0}))
        await until(lambda: len(daemon.engine.streams) == 2)
        for stream, token in reversed(list(zip(daemon.engine.streams, (5, 6), strict=True))):
            stream.put(tokens([token], prompt=1, finish=FinishReason.LENGTH, with_logprobs=True))
        answers: Any = await call
        assert [each.outputs[0].token_ids for each in answers] == [[5], [6]]
        assert [each.prompt for each in answers] == [None, "text"]
        assert answers[0].outputs[0].logprobs[0][5].logprob == -5.0
        assert [each.generation.sequences[0].weight_spans for each in answers] == [[(0, 0, 1, 0)]] * 2


async def test_a_generation_ends_after_its_timeout() -> None:
    """With torchrl's error."""
    async with routed(1) as fleet, engine_of(fleet.running.address) as engine:
        with pytest.raises(TimeoutError):
            await in_thread(engine.generate, IDS, timeout_seconds=0.2)


async def test_arguments_that_vllm_has_given_up_are_refused() -> None:
    """And not ignored."""
    async with replica() as daemon, engine_of(daemon.address) as engine:
        for name in ("prompt_adapter_request", "guided_options_request"):
            with refuses(UnsupportedError, says="lora_request"):
                await in_thread(engine.generate, IDS, **{name: object()})


async def test_the_balancer_selects_by_what_replicas_report() -> None:
    """Requests and cache are looked at where the names say so; the statistics are torchrl's."""
    async with routed(3) as fleet, engine_of(fleet.running.address) as engine:
        reported = ((5, 0.1), (1, 0.9), (7, 0.5))
        for daemon, (running, kv_usage) in zip(fleet.daemons, reported, strict=True):
            daemon.engine.current_load = Load(running, 0, kv_usage, 0.0, 0.0)
        counts = [running for running, _ in reported]
        async with asyncio.timeout(STEP_S):
            while await in_thread(engine.get_num_unfinished_requests) != counts:
                await asyncio.sleep(0.05)
        assert await in_thread(engine.get_num_unfinished_requests, 2) == 7
        for ask in (engine.get_num_unfinished_requests, engine.get_cache_usage):
            for index in (-1, 3):
                with pytest.raises(IndexError, match=rf"in \[0, 3\), is {index}"):
                    await in_thread(ask, index)
        assert await in_thread(engine.get_cache_usage) == pytest.approx([0.1, 0.9, 0.5])
        for strategy, expected in (("requests", 1), ("kv-cache", 0), (["kv-cache", "requests"], 0)):
            balancer = engine.create_load_balancer(strategy)
            assert {await in_thread(balancer.select_actor) for _ in range(3)} == {expected}
        turns = engine.create_load_balancer("round-robin")
        assert sorted([await in_thread(turns.select_actor) for _ in range(3)]) == [0, 1, 2]
        statistics = await in_thread(turns.get_stats)
        assert [each["pending_requests"] for each in statistics["actor_stats"]] == counts
        assert (statistics["num_actors"], statistics["decisions"]) == (3, {"round-robin": 3})


async def test_strategies_that_torchrl_lacks_are_refused() -> None:
    """A misspelt name does not become another strategy."""
    async with replica() as daemon, engine_of(daemon.address) as engine:
        for strategy in ("prefix", [], ["requests", "fastest"]):
            with pytest.raises(ValueError, match="strategies are"):
                engine.create_load_balancer(strategy)
        assert engine.create_load_balancer().strategies == ["prefix-aware", "requests"]


async def test_a_daemon_is_its_own_only_replica() -> None:
    """Everything goes without a router."""
    async with replica() as daemon, engine_of(daemon.address) as engine:
        assert await in_thread(lambda: engine.actors) == [daemon.address]
        assert await in_thread(engine.create_load_balancer().select_actor, "a text") == 0
        await in_thread(engine.update_weights, tensors(3))
        assert daemon.engine.live == content(3)
        call = asyncio.create_task(in_thread(engine.generate, IDS, actor_index=0))
        await answered(daemon, [8])
        assert (await call).outputs[0].token_ids == [8]  # type: ignore[union-attr]


async def test_an_engine_that_cannot_be_made_leaves_no_connection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A torchrl that is installed may not be importable."""
    (tmp_path / "torchrl").mkdir()
    (tmp_path / "torchrl" / "__init__.py").write_text('raise ImportError("there is no tensordict")')
    monkeypatch.syspath_prepend(tmp_path)
    async with replica() as daemon:
        before = num_clients()
        with pytest.raises(ImportError, match="there is no tensordict"):
            await in_thread(AsyncVLLM, daemon.address)
        assert num_clients() == before


async def test_a_pickled_engine_connects_again() -> None:
    """With its settings, also when the first one is gone: collectors of torchrl run in other processes."""
    async with routed(1) as fleet:
        async with engine_of(fleet.running.address) as complete:
            await in_thread(complete.update_weights, tensors(1))
        async with engine_of(fleet.running.address, partial=True) as engine:
            pickled = pickle.dumps(engine)
        copy = await in_thread(pickle.loads, pickled)
        await in_thread(copy.update_weights, tensors(2, "b"))
        assert fleet.daemons[0].engine.live == {**content(1), "b": content(2)["b"]}
        await in_thread(copy.shutdown)
