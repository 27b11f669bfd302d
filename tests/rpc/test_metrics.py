"""The series of a daemon on a scripted engine: what calls, pushes and pauses do to them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import grpc
import pytest

from genserve.engine.staleness import CLASSES
from genserve.engine.types import Load
from genserve.ingest.processes import IngestProcesses
from genserve.ingest.relay import IngestSettings
from genserve.metrics.daemon import DaemonSeries
from genserve.metrics.process import ProcessMetrics
from genserve.settings.config import ServeConfig
from genserve.v1 import control_pb2
from genserve.v1.weights_pb2_grpc import WeightServiceStub
from genserve.wire.literals import ROUTER_ID_KEY
from tests.rpc.frames import END, chunk, header, push, refused
from tests.support.answers import answer_of
from tests.support.scraped import Scrape, scrape, scraped_until
from tests.support.scripted_daemon import MAX_MESSAGE_BYTES, Daemon, GeneratingEngine, serving

_PUSH = {"grpc_service": "genserve.v1.WeightService", "grpc_method": "PushWeights", "grpc_type": "client_stream"}


@dataclass
class Measured:
    """What an engine tells beside its protocol."""

    engine: GeneratingEngine
    heartbeat_age_s: float | None = 0.25

    def served_tokens(self) -> list[int]:
        return [10 * number for number in range(len(CLASSES))]

    def load(self) -> Load:
        return Load(running=3, waiting=4, kv_usage=0.5, tokens_per_second=1.0, prefix_cache_hit_rate=0.0)


@dataclass
class Shown:
    """A daemon, and where its series are."""

    daemon: Daemon
    url: str

    async def until(self, name: str, value: float, **labels: str) -> Scrape:
        return await scraped_until(self.url, lambda found: found.value(name, **labels) == value)


@pytest.fixture
async def shown(request: pytest.FixtureRequest) -> AsyncIterator[Shown]:
    """With a process that receives pushes, if the test says so."""
    metrics = ProcessMetrics("daemon")
    async with AsyncExitStack() as stack:
        ingest = None
        if getattr(request, "param", False):
            ingest = IngestProcesses(
                1, IngestSettings("127.0.0.1", 0, "", (("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),))
            )
            stack.push_async_callback(ingest.stop)
            await ingest.start()
        daemon = await stack.enter_async_context(serving(ServeConfig(port=0), ingest, observers=[metrics.calls]))
        read = DaemonSeries(Measured(daemon.engine), daemon.parts).read
        yield Shown(daemon, await metrics.serve("127.0.0.1", 0, read, stack))


async def test_a_push_counts_with_its_bytes_its_steps_and_its_version(shown: Shown) -> None:
    """Each step of the push is there once, and the call has the status that its trainer got."""
    before = await shown.until("genserve_serving", 1)
    assert (before.value("genserve_weight_version"), before.value("genserve_push_step_seconds_count")) == (0, 0)
    assert before.value("genserve_phase", phase="RUNNING") == before.value("genserve_phase") == 1
    await push(shown.daemon, [await header(shown.daemon), chunk(0, 32), END])
    after = await shown.until("grpc_server_handled_total", 1, grpc_code="OK", **_PUSH)
    assert after.value("genserve_weight_version") == 1
    assert after.value("genserve_push_received_bytes_total") == 32
    assert after.value("genserve_pushes_total", kind="weights", outcome="APPLIED") == 1
    assert after.value("genserve_arena_bytes", use="resident") > 0
    for step in ("open", "receive", "verify", "check", "wait", "prepare", "pause", "commit", "resume"):
        assert after.value("genserve_push_step_seconds_count", step=step) == 1
    assert after.value("genserve_push_paused_seconds_count") == after.value("genserve_pause_seconds_count") == 1
    assert after.value("grpc_server_handling_seconds_count", **_PUSH) == 1


async def test_a_push_that_is_cut_off_counts_by_the_reason_of_its_error(shown: Shown) -> None:
    """The bytes that came are there; nothing was applied. The series is there before, or `increase` would not see the
    first failure."""
    before, labels = await asyncio.to_thread(scrape, shown.url), {("kind", "weights"), ("outcome", "PUSH_TRUNCATED")}
    assert before.samples["genserve_pushes_total", frozenset(labels)] == 0
    error = await refused(shown.daemon, [await header(shown.daemon), chunk(0, 8), END])
    assert error.code() is grpc.StatusCode.ABORTED
    after = await shown.until("grpc_server_handled_total", 1, grpc_code="ABORTED", **_PUSH)
    assert after.value("genserve_pushes_total", outcome="PUSH_TRUNCATED") == after.value("genserve_pushes_total") == 1
    assert after.value("genserve_push_received_bytes_total") == 8
    assert (after.value("genserve_open_pushes"), after.value("genserve_push_step_seconds_count")) == (1, 0)
    assert after.value("genserve_arena_bytes", use="staged") > 0


@pytest.mark.slow
@pytest.mark.parametrize("shown", [True], indirect=True)
async def test_push_through_a_receiving_process_counts_as_the_trainers_call(shown: Shown) -> None:
    """With its status, which the daemon passes on in a message."""
    assert shown.daemon.parts.ingest is not None
    (port,) = shown.daemon.parts.ingest.ports
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = WeightServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await answer_of(stub.PushWeights(iter([await header(shown.daemon), END]), timeout=30))
        await answer_of(
            stub.PushWeights(iter([await header(shown.daemon, push_id="2"), chunk(0, 32), END]), timeout=30)
        )
    await shown.until("grpc_server_handled_total", 1, grpc_code="OK", **_PUSH)
    after = await shown.until("grpc_server_handled_total", 1, grpc_code="ABORTED", **_PUSH)
    assert after.value("grpc_server_started_total", **_PUSH) == 2
    assert after.value("grpc_server_started_total", grpc_service="genserve.internal.Ingest") == 0


async def test_a_pause_is_seen_while_it_lasts_and_counted_when_it_ends(shown: Shown) -> None:
    """As a lease, as the phase, and as time."""
    paused = await shown.daemon.control.Pause(control_pb2.PauseRequest(holder="h", no_expiry=True))
    during = await shown.until("genserve_pause_leases", 1)
    assert during.value("genserve_phase", phase="PAUSED") == during.value("genserve_phase") == 1
    assert during.value("genserve_paused_seconds") > 0
    assert during.value("genserve_pause_seconds_count") == 0
    await shown.daemon.control.Resume(control_pb2.ResumeRequest(lease_id=paused.lease.lease_id))
    after = await shown.until("genserve_pause_seconds_count", 1)
    assert (after.value("genserve_pause_leases"), after.value("genserve_paused_seconds")) == (0, 0)


async def test_what_the_engine_tells_is_there(shown: Shown) -> None:
    """Its load, the age of its heartbeat, and how old its tokens were."""
    found = await shown.until("genserve_heartbeat_age_seconds", 0.25)
    assert [found.value("genserve_sequences", state=state) for state in ("running", "waiting")] == [3, 4]
    classes = [found.value("genserve_served_tokens_total", versions_behind=name) for name in CLASSES]
    assert classes == [10 * number for number in range(len(CLASSES))]


async def test_no_label_is_what_a_client_has_said(shown: Shown) -> None:
    """Ids, holders and names would be series for ever, and tell who may scrape what others do."""
    await shown.daemon.control.Pause(control_pb2.PauseRequest(holder="secret-holder", request_id="secret-id"))
    await push(shown.daemon, [await header(shown.daemon, push_id="secret-push"), chunk(0, 32), END])
    after = await shown.until("genserve_weight_version", 1)
    assert "secret" not in after.text


async def test_a_refused_router_makes_no_series_of_methods_that_are_not_there(shown: Shown) -> None:
    """Names of methods are up to the client: each would be series for ever, and a handler that is kept."""
    for metadata in ((), ((ROUTER_ID_KEY, "stranger"),)):
        with pytest.raises(grpc.aio.AioRpcError):
            await shown.daemon.channel.unary_unary("/secret-service/secret-method")(b"", metadata=metadata, timeout=30)
    after = await shown.until("grpc_server_handled_total", 2)
    assert after.value("grpc_server_handled_total", grpc_code="UNIMPLEMENTED", grpc_method="unknown") == 2
    assert "secret" not in after.text


async def test_a_refused_call_counts_with_the_type_of_its_method(shown: Shown) -> None:
    """It is refused before its message is read, as a stream would be."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await shown.daemon.control.Pause(control_pb2.PauseRequest(), metadata=((ROUTER_ID_KEY, "stranger"),))
    pause = {"grpc_service": "genserve.v1.ControlService", "grpc_method": "Pause", "grpc_type": "unary"}
    after = await shown.until("grpc_server_handled_total", 1, grpc_code=refused.value.code().name, **pause)
    assert after.value("grpc_server_handled_total", grpc_method="Pause") == 1
