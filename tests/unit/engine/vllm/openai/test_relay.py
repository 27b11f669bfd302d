"""What passes between an OpenAI server and EngineCore, over real sockets."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import psutil
import pytest
import zmq
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequestType, FinishReason

from genserve.engine.vllm.openai import link
from genserve.engine.vllm.openai.relay import Relay
from genserve.engine.vllm.requests.refusals import Serving
from tests.support.patience import stand_still, until
from tests.unit.engine.vllm.openai.ends import READY, Engines, Meter, Server, Tally, identity
from tests.unit.engine.vllm.openai.failing import no_more_files

ADD, ABORT, UTILITY = (EngineCoreRequestType[name].value for name in ("ADD", "ABORT", "UTILITY"))
MAX_ACTIVE = 3
pytestmark = pytest.mark.timeout(120)


@dataclass
class Relayed:
    """A relay and its two ends."""

    relay: Relay
    engines: Engines
    server: Server
    meter: Meter
    tally: Tally

    async def next_server(self) -> None:
        """The process of the server has died, and another one joins."""
        self.server.close()
        self.relay.shut()
        self.server = Server(self.relay.open())


async def relayed(num_engines: int, max_active: int = MAX_ACTIVE) -> AsyncIterator[Relayed]:
    """Whose server has joined."""
    engines, meter, tally = Engines(num_engines), Meter(), Tally()
    ranks = [identity(rank) for rank in range(num_engines)]
    relay = Relay(engines.place, ranks, tally, max_active, meter, Serving("v2"))
    running = asyncio.create_task(relay.run())
    both = Relayed(relay, engines, Server(relay.open()), meter, tally)
    assert {await both.server.ready() for _ in range(num_engines)} == {(identity(i), READY) for i in range(num_engines)}
    yield both
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    both.server.close()
    relay.close()
    engines.close()


@pytest.fixture
async def one() -> AsyncIterator[Relayed]:
    """In front of one engine."""
    async for each in relayed(1):
        yield each


@pytest.fixture
async def two() -> AsyncIterator[Relayed]:
    """In front of two engines."""
    async for each in relayed(2):
        yield each


async def test_requests_and_their_tokens_pass(one: Relayed) -> None:
    """As they are, with the version of the weights; the daemon knows what is unfinished, and how much was sampled."""
    await one.server.add("a")
    await one.server.add("b")
    assert [await one.engines.taken(), await one.engines.taken()] == [(ADD, "a"), (ADD, "b")]
    assert one.relay.num_requests == one.tally.published == await one.relay.pausing() == 2
    await one.engines.step({"a": [5, 6], "b": [7]}, ended=["a"], running=1)
    step = await one.server.got()
    assert [(each.request_id, each.new_token_ids, each.finish_reason) for each in step.outputs] == [
        ("a", [5, 6], FinishReason.LENGTH),
        ("b", [7], None),
    ]
    assert (step.weight_version, one.relay.num_requests, one.tally.published) == ("3", 1, 1)
    assert (one.meter.num_tokens, one.meter.running) == (3, [1])


async def test_the_end_of_the_last_request_is_told(one: Relayed) -> None:
    """A drain waits for it."""
    await one.relay.wait_idle()
    await one.server.add("a")
    await one.engines.taken()
    idle = asyncio.create_task(one.relay.wait_idle())
    await one.engines.step({"a": [5]})
    await one.server.got()
    assert not idle.done()
    await one.engines.step({"a": [6]}, ended=["a"])
    await idle


async def test_what_the_server_aborts_is_forgotten(one: Relayed) -> None:
    """EngineCore says nothing more of it. An id that does not run is not passed on: it may be a request of gRPC's."""
    await one.server.add("a")
    await one.engines.taken()
    await one.server.abort("grpc", "a")
    assert await one.engines.taken() == (ABORT, ["a"])
    assert one.relay.num_requests == 0
    await one.server.abort("grpc")
    await one.server.add("b")
    assert await one.engines.taken() == (ADD, "b")


@pytest.mark.parametrize(
    "much",
    [
        SamplingParams(allowed_token_ids=[3] * 1025),
        SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)),
        SamplingParams(min_tokens=1, stop_token_ids=[*range(129)]),
        SamplingParams(seed=2**63),  # of the second of two sequences
    ],
)
async def test_a_request_that_would_end_the_engine_ends_with_an_error(one: Relayed, much: SamplingParams) -> None:
    """Model Runner V2 holds no more than that, and vLLM's server does not ask. All else passes."""
    await one.server.add("a", params=much)
    (output,) = (await one.server.got()).outputs
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ERROR)
    assert one.relay.num_requests == 0
    ordinary = SamplingParams(
        allowed_token_ids=[3], logit_bias={3: 1.0}, min_tokens=1, stop_token_ids=[4], bad_words=["x"], max_tokens=2
    )
    await one.server.add("b", params=ordinary)
    assert await one.engines.taken() == (ADD, "b")


@pytest.mark.parametrize("method", ["pause_scheduler", "collective_rpc", "add_lora", "set_weight_version", "sleep"])
async def test_calls_that_control_the_engine_are_refused(one: Relayed, method: str) -> None:
    """With an error, and without the engine."""
    await one.server.call(method)
    answer = (await one.server.got()).utility_output
    assert answer is not None and answer.call_id == 7
    assert answer.failure_message == f"{method}: only genserve's gRPC services control the engine of this server"
    await one.server.add("a")
    assert await one.engines.taken() == (ADD, "a")


async def test_a_call_that_changes_nothing_is_passed_on(one: Relayed) -> None:
    """And so is its answer."""
    await one.server.call("get_supported_tasks")
    assert await one.engines.taken() == (UTILITY, "get_supported_tasks")
    await one.engines.answer(7)
    answer = (await one.server.got()).utility_output
    assert answer is not None and (answer.call_id, answer.failure_message) == (7, "as asked")


async def test_a_server_that_starts_does_not_reset_the_engine(one: Relayed) -> None:
    """It asks for that, and is told that it is done."""
    await one.server.call("reset_mm_cache")
    answer = (await one.server.got()).utility_output
    assert answer is not None and (answer.call_id, answer.failure_message) == (7, None)
    await one.server.add("a")
    assert await one.engines.taken() == (ADD, "a")


async def test_more_requests_than_the_limit_fail(one: Relayed) -> None:
    """In the server, with vLLM's reason for a request that may be repeated. The limit is that of all clients."""
    one.tally.num_elsewhere = 1
    for each in "abc":
        await one.server.add(each)
    failed = (await one.server.got()).outputs
    assert [(each.request_id, each.finish_reason) for each in failed] == [("c", FinishReason.ERROR)]
    assert [await one.engines.taken() for _ in range(2)] == [(ADD, "a"), (ADD, "b")]
    assert one.relay.num_requests + one.tally.num_elsewhere == MAX_ACTIVE


async def test_the_daemon_aborts_requests_at_both_ends(two: Relayed) -> None:
    """Each in its engine; the server is told, and ids that do not run are left out."""
    await two.server.add("a")
    await two.server.add("b", rank=1)
    assert (await two.engines.taken(0), await two.engines.taken(1)) == ((ADD, "a"), (ADD, "b"))
    assert await two.relay.abort(["a", "unknown"]) == ["a"]
    assert await two.engines.taken(0) == (ABORT, ["a"])
    told = await two.server.got()
    assert [(told.engine_index, each.request_id, each.finish_reason) for each in told.outputs] == [
        (0, "a", FinishReason.ABORT)
    ]
    assert await two.relay.abort(None) == ["b"]
    assert await two.engines.taken(1) == (ABORT, ["b"])
    assert (await two.server.got()).engine_index == 1
    assert two.relay.num_requests == 0


async def test_requests_of_a_server_that_has_died_are_aborted(two: Relayed) -> None:
    """In their engines. The next process gets what the engines have said once, and no output of the last one."""
    await two.server.add("a")
    await two.server.add("b", rank=1)
    assert (await two.engines.taken(0), await two.engines.taken(1)) == ((ADD, "a"), (ADD, "b"))
    await two.next_server()
    assert (await two.engines.taken(0), await two.engines.taken(1)) == ((ABORT, ["a"]), (ABORT, ["b"]))
    assert two.relay.num_requests == 0
    assert {await two.server.ready() for _ in range(2)} == {(identity(0), READY), (identity(1), READY)}
    await two.server.add("c", rank=1)
    assert await two.engines.taken(1) == (ADD, "c")
    await two.engines.step({"c": [9]}, ended=["c"], rank=1)
    assert [each.request_id for each in (await two.server.got()).outputs] == ["c"]


async def test_a_server_that_does_not_read_is_reported(one: Relayed, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what waits for it is bounded."""
    monkeypatch.setattr(link, "_MAX_UNREAD", 4)
    await one.next_server()
    one.server.close()
    for _ in range(20):
        await one.engines.step({"a": [5] * 100_000})
    await one.relay.broken.wait()
    assert one.relay.why_broken == "it has not read 4 messages"
    await one.next_server()
    assert not one.relay.broken.is_set()


@pytest.mark.parametrize("frames", [(ADD, b"\xc1"), (ADD, b"\x91\xa2\xff\xfe"), (ADD,), (b"\x09", b"\x90")])
async def test_a_message_that_is_none_of_vllms_is_reported(one: Relayed, frames: tuple[bytes, ...]) -> None:
    """The daemon serves on, and the engine does not get it."""
    await one.server.send(*frames)
    await one.relay.broken.wait()
    assert one.relay.why_broken.startswith("it has sent what no client of vLLM's sends: ")
    await one.next_server()
    await one.server.ready()
    await one.server.add("a")
    assert await one.engines.taken() == (ADD, "a")


async def test_many_requests_at_once_leave_everybody_their_turn() -> None:
    """A flood over HTTP does not stop the streams of gRPC, whose turns are between two requests."""
    async for one in relayed(1, max_active=200):
        for number in range(200):
            await one.server.add(str(number))
        stand_still(0.2)  # all of them wait in the daemon's socket now
        num_taken = most_at_once = 0
        while num_taken < 200:
            await asyncio.sleep(0)
            before, num_taken = num_taken, one.relay.num_requests
            most_at_once = max(most_at_once, num_taken - before)
        assert most_at_once == 1


async def test_many_steps_at_once_leave_everybody_their_turn(one: Relayed) -> None:
    """The same for what has come while the daemon was late."""
    for _ in range(100):
        await one.engines.step({"a": [5]})
    stand_still(0.2)
    most_at_once = 0
    while (before := one.meter.num_tokens) < 100:
        await asyncio.sleep(0)
        most_at_once = max(most_at_once, one.meter.num_tokens - before)
    assert most_at_once == 1


@pytest.mark.parametrize("num_files", range(1, 9))
async def test_a_place_that_cannot_be_made_leaves_nothing(
    two: Relayed, num_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far it came: neither files nor sockets, for which the end of the daemon would wait."""
    two.server.close()
    two.relay.shut()
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", directory)
        num_before = psutil.Process().num_fds()
        with no_more_files(but=num_files), suppress(OSError, zmq.ZMQError):
            two.relay.open()
        two.relay.shut()
        # A thread of zmq's closes its sockets.
        await until(lambda: not os.listdir(directory) and psutil.Process().num_fds() <= num_before)
