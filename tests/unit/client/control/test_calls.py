"""Pausing, looking and waiting."""

import asyncio
from datetime import UTC
from typing import Any

import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2

from genserve.client import AsyncClient
from genserve.errors import DeadlineError, InvalidFieldError, PauseLeaseLostError, UnavailableError
from genserve.v1 import control_pb2, types_pb2
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, turns
from tests.support.refusals import refuses
from tests.support.scripted_services import ScriptedDaemon, refuse, running_daemon
from tests.unit.client.control.hastened import hasten_renewals


async def test_paused_renews_until_the_block_ends_and_then_resumes(
    daemon: ScriptedDaemon, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the time to live passes, the lease is renewed; at the end it is given back."""
    hasten_renewals(monkeypatch, 30.0)
    async with client.paused("abort", ttl_s=30.0, holder="me") as lease:
        assert (lease.holder, lease.mode) == ("me", "abort")
        await asyncio.wait_for(daemon.renewed.wait(), STEP_S)
        daemon.renewed.clear()
        await asyncio.wait_for(daemon.renewed.wait(), STEP_S)
        assert daemon.resumed == []
    assert daemon.resumed == ["lease-1"]


async def test_paused_resumes_when_the_block_fails(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """The block's error is what the caller sees."""
    with pytest.raises(ZeroDivisionError):
        async with client.paused():
            raise ZeroDivisionError
    assert daemon.resumed == ["lease-1"]


async def test_paused_resumes_when_the_block_is_cancelled(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Cancellation passes through after the engine runs again."""
    inside = asyncio.Event()

    async def hold() -> None:
        async with client.paused():
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert daemon.resumed == ["lease-1"]


async def test_a_lease_lost_inside_the_block_is_raised_at_its_end(
    daemon: ScriptedDaemon, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block is not interrupted, but it cannot end as if nothing had happened."""
    hasten_renewals(monkeypatch, 30.0)

    async def hold() -> str:
        async with client.paused(ttl_s=30.0):
            daemon.leases.clear()
            await asyncio.wait_for(daemon.renewed.wait(), STEP_S)
            block = "whole"
        return block

    with refuses(PauseLeaseLostError):
        await hold()


async def test_a_lost_lease_is_raised_from_the_error_of_the_block(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Both are told: the block's error is the cause."""

    async def fail() -> None:
        async with client.paused():
            daemon.leases.clear()
            raise ZeroDivisionError

    with pytest.raises(PauseLeaseLostError) as raised:
        await fail()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


async def test_a_lease_that_could_not_be_renewed_in_time_is_lost(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Two failed renewals are survived; a time to live without any is not."""
    daemon.renewals_hang = True

    async def hold() -> None:
        async with client.paused(ttl_s=0.15) as lease, asyncio.timeout(STEP_S):
            while not lease.is_lost:
                await asyncio.sleep(0.01)

    with refuses(PauseLeaseLostError) as caught:
        await hold()
    assert isinstance(caught.value.__cause__, DeadlineError)


async def test_pause_and_resume_by_hand(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """Leases are told with UTC times; one without expiry has none."""
    paused = await client.pause("wait", "recompute", ttl_s=10)
    assert paused.lease.expire_time is not None
    assert paused.lease.expire_time.tzinfo is UTC
    assert paused.requests_kept == 2
    assert paused.state.phase == "paused"
    assert (await client.pause(no_expiry=True)).lease.expire_time is None
    resumed = await client.resume(force=True)
    assert (resumed.state.phase, resumed.state.pauses) == ("running", [])
    with pytest.raises(InvalidFieldError):
        await client.pause("stop")  # type: ignore[arg-type]


async def test_a_bare_pause_says_how_long_it_may_take_and_no_more(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """The rest is left to the daemon; `paused` has to know when to renew. An id lets a cancelled one be found."""
    await client.pause()
    async with client.paused():
        pass
    assert len({each.request_id for each in daemon.pauses}) == 2
    for each in daemon.pauses:
        each.ClearField("request_id")
    minute = Duration(seconds=60)
    bare = control_pb2.PauseRequest(timeout=minute)
    assert daemon.pauses == [bare, control_pb2.PauseRequest(timeout=minute, ttl=minute)]
    await client.pause("abort", "recompute", holder="me", ttl_s=1.5, request_id="r", timeout_s=2)
    assert daemon.pauses[-1] == control_pb2.PauseRequest(
        mode=types_pb2.PAUSE_MODE_ABORT, kv_policy=types_pb2.KV_POLICY_RECOMPUTE, holder="me", request_id="r",
        ttl=Duration(seconds=1, nanos=500_000_000), timeout=Duration(seconds=2),
    )  # fmt: skip


async def test_status_once_and_on_every_change(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """`watch_status` is an iterator of what `status` answers, at the interval that was asked for."""
    status = await client.status()
    assert (status.load.running, status.load.kv_usage) == (3, 0.25)
    async with client.watch_status(interval_s=1, heartbeat_s=2) as statuses:
        assert [status.load.running async for status in statuses] == [0, 1]
    async with client.watch_status() as statuses:
        assert [status.load.running async for status in statuses] == [0, 1]
    with_interval = control_pb2.WatchStatusRequest(interval=Duration(seconds=1), heartbeat=Duration(seconds=2))
    assert daemon.watches == [with_interval, control_pb2.WatchStatusRequest()]


async def test_server_info_and_cache(client: AsyncClient) -> None:
    """Plain values."""
    info = await client.server_info()
    assert (info.model, info.versions) == ("smol", {"vllm": "1"})
    assert await client.reset_cache()


async def has_been_answered(client: AsyncClient) -> None:
    """Returns when what was called over the client's connection before has its first answer."""
    for _ in range(5):
        await client.server_info()
    await turns()


async def test_wait_ready_waits_until_the_daemon_serves(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """A daemon that answers but is not ready yet is waited for."""
    await daemon.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    waiting = asyncio.create_task(client.wait_ready())
    await has_been_answered(client)
    assert not waiting.done()
    await daemon.health.set("", health_pb2.HealthCheckResponse.SERVING)
    await waiting


async def test_wait_ready_waits_for_a_daemon_that_is_not_there_yet(tmp_path: object) -> None:
    """Client first, daemon later."""
    async with AsyncClient(f"unix:{tmp_path}/s") as client:
        waiting = asyncio.create_task(client.wait_ready())
        with pytest.raises(UnavailableError):  # so it has tried to connect
            await client.status()
        async with running_daemon(f"unix:{tmp_path}/s"):
            await waiting


async def test_wait_ready_gives_up() -> None:
    """With the usual error for something that took too long."""
    async with AsyncClient("127.0.0.1:1") as client:
        with refuses(DeadlineError, says="127.0.0.1:1"):
            await client.wait_ready(0.2)


async def test_wait_ready_gives_up_after_ten_minutes_unless_it_is_told_when() -> None:
    """A large model takes minutes to load."""
    with advanced_clock() as clock:
        async with AsyncClient("127.0.0.1:1") as client:
            waiting = asyncio.create_task(client.wait_ready())
            await clock.advance(500)
            assert not waiting.done()
            await clock.advance(101)
            with refuses(DeadlineError, says="127.0.0.1:1 within 600 s"):
                await waiting


async def test_wait_ready_lets_grpc_look_for_a_daemon_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call waits for the connection: asking again and again would keep a core busy."""
    begun: list[str] = []

    class Counted(grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
        async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
            begun.append(bytes(details.method).decode())
            return await continuation(details, request)

    channel = grpc.aio.insecure_channel

    def counting_channel(target: str, options: Any) -> grpc.aio.Channel:
        return channel(target, options=options, interceptors=[Counted()])

    monkeypatch.setattr(grpc.aio, "insecure_channel", counting_channel)
    with advanced_clock() as clock:
        async with AsyncClient("127.0.0.1:1") as client:
            waiting = asyncio.create_task(client.wait_ready())
            for _ in range(3):
                await clock.advance(100)
            with pytest.raises(UnavailableError):  # so it has tried to connect
                await client.status()
            assert not waiting.done()
            await clock.advance(301)
            with pytest.raises(DeadlineError):
                await waiting
    assert begun == ["/grpc.health.v1.Health/Watch"]


async def test_wait_ready_that_gives_up_says_what_the_daemon_does(
    daemon: ScriptedDaemon, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that sleeps is there, and becomes ready when somebody wakes it up."""
    monkeypatch.setattr("genserve.client.control.LAST_LOOK_S", STEP_S)
    await client.sleep()
    await daemon.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert "asleep; wake it up (wake_up()" in await waited_in_vain(client)
    await client.wake_up()
    assert "it is running" in await waited_in_vain(client)


async def waited_in_vain(client: AsyncClient) -> str:
    """What a wait of ten minutes ends with, of a daemon that has said that it does not serve."""
    with advanced_clock() as clock:
        waiting = asyncio.create_task(client.wait_ready())
        await has_been_answered(client)
        await clock.advance(601)
        with refuses(DeadlineError) as raised:
            await waiting
    return raised.value.message


async def test_wait_ready_error_without_known_state_names_no_state(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """It is the same error."""
    daemon.fail = lambda context: refuse(context, code_pb2.ABORTED, "QUEUE_FULL", "full")
    await daemon.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert (await waited_in_vain(client)).endswith("within 600 s")


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        (lambda client: client.sleep(level=-1), "level", "-1"),
        (lambda client: client.sleep(tags="kv_cache"), "tags", "'kv_cache'"),
    ],
)
async def test_a_wrong_argument_is_named_once(client: AsyncClient, call: Any, field: str, value: str) -> None:
    """With its value."""
    with refuses(InvalidFieldError, field=field, says=value) as caught:
        await call(client)
    assert caught.value.message.count(field) == 1


async def test_sleep_and_wake_up_send_level_and_tags(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """A level of 0 is sent as such, and none is not sent."""
    asleep = await client.sleep("wait", level=0, tags=("kv_cache",), timeout_s=5.0)
    assert (asleep.phase, asleep.asleep_tags, asleep.weights_discarded) == (
        "sleeping",
        ["scheduling", "weights", "kv_cache"],
        True,
    )
    assert (await client.wake_up(["weights"])).asleep_tags == ["scheduling", "kv_cache"]
    assert (await client.wake_up()).asleep_tags == []
    await client.sleep()
    timeouts = [Duration(seconds=5), Duration(seconds=60)]
    assert daemon.sleeps == [
        control_pb2.SleepRequest(mode=types_pb2.PAUSE_MODE_WAIT, level=0, tags=["kv_cache"], timeout=timeouts[0]),
        control_pb2.WakeUpRequest(tags=["weights"]),
        control_pb2.WakeUpRequest(),
        control_pb2.SleepRequest(timeout=timeouts[1]),
    ]
    assert not daemon.sleeps[-1].HasField("level")


async def test_a_wake_up_may_take_as_long_as_a_push(daemon: ScriptedDaemon, client: AsyncClient) -> None:
    """The daemon may have to restore weights."""
    await client.wake_up()
    assert daemon.remaining_s is not None
    assert 60 < daemon.remaining_s < 305  # what gRPC says of it may be rounded up


@pytest.mark.parametrize("call", ["sleep", "pause"])
async def test_a_call_that_pauses_ends_ten_seconds_after_the_daemon_s_limit(
    daemon: ScriptedDaemon, client: AsyncClient, call: str
) -> None:
    """The daemon gives up first and says why, rather than the connection."""
    await getattr(client, call)(timeout_s=60.0)
    assert daemon.remaining_s is not None
    assert 60 < daemon.remaining_s < 70.5  # what gRPC says of it may be rounded up


@pytest.mark.parametrize("call", ["sleep", "wake_up"])
async def test_a_tag_alone_is_no_list_of_letters(client: AsyncClient, call: str) -> None:
    """Text where a sequence is meant names the field."""
    with refuses(InvalidFieldError, field="tags"):
        await getattr(client, call)(tags="weights")
