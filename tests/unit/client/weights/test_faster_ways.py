"""Which pushes ask the daemon for a faster way than one connection, how long they wait for its answer, and what they
do with it."""

from typing import Any

import numpy
import pytest
from google.rpc import code_pb2, error_details_pb2

from genserve.client import AsyncClient, Timeouts
from genserve.client.weights import calls
from genserve.errors import InvalidFieldError, UnsupportedError
from genserve.transport import channels
from genserve.v1 import control_pb2
from tests.support.refusals import refuses
from tests.support.scripted_services import ScriptedDaemon, refuse, running_daemon

SHARES_BYTES, HAS_PORTS_BYTES = 100, 200


class AskedDaemon(ScriptedDaemon):
    """Remembers the deadline of each GetServerInfo, and answers with `ingest_ports`."""

    def __init__(self) -> None:
        super().__init__()
        self.deadlines_s: list[float | None] = []
        self.ingest_ports: list[int] = []

    async def GetServerInfo(self, request: Any, context: Any) -> control_pb2.GetServerInfoResponse:
        await self._begin(context)
        self.deadlines_s.append(self.remaining_s)
        return control_pb2.GetServerInfoResponse(ingest_ports=self.ingest_ports)


def test_memory_is_worth_it_from_8_mebibytes_on_and_ports_from_64() -> None:
    """The other tests set these limits lower."""
    assert (calls.MIN_BYTES, channels.PUSH_MIN_BYTES) == (8 << 20, 64 << 20)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MIN_BYTES", SHARES_BYTES)
    monkeypatch.setattr(channels, "PUSH_MIN_BYTES", HAS_PORTS_BYTES)


def weights(size_bytes: int) -> dict[str, Any]:
    """One tensor."""
    return {"w": numpy.zeros(size_bytes, "uint8")}


@pytest.mark.parametrize(
    ("size_bytes", "options", "host", "asks"),
    [
        (SHARES_BYTES - 1, {}, "127.0.0.1", False),
        (SHARES_BYTES, {}, "127.0.0.1", True),
        (SHARES_BYTES, {}, "0.0.0.0", False),  # no address of this host alone
        (SHARES_BYTES, {"shared_memory": False}, "127.0.0.1", False),
        (HAS_PORTS_BYTES - 1, {"shared_memory": False}, "127.0.0.1", False),
        (HAS_PORTS_BYTES, {"shared_memory": False}, "127.0.0.1", True),
        (HAS_PORTS_BYTES - 1, {}, "0.0.0.0", False),
        (HAS_PORTS_BYTES, {}, "0.0.0.0", True),
        (HAS_PORTS_BYTES, {"action": "validate"}, "127.0.0.1", False),
    ],
)
@pytest.mark.usefixtures("small_limits")
async def test_a_push_that_a_faster_way_is_worth_asks_for_it(
    size_bytes: int, options: dict[str, Any], host: str, asks: bool
) -> None:
    """Memory on this host from some size on, more ports from another one; and sends its bytes where there is none."""
    async with running_daemon(daemon=AskedDaemon()) as daemon:
        assert isinstance(daemon, AskedDaemon)
        async with AsyncClient(daemon.target.replace("127.0.0.1", host)) as client:
            await client.push_weights(weights(size_bytes), version=1, **options)
        assert len(daemon.deadlines_s) == int(asks)
        assert len(daemon.pushed_bytes()) == size_bytes
        assert sum(end - start for ((start, end),) in filter(None, daemon.streams)) == (
            0 if options.get("action") else size_bytes
        )


async def test_memory_that_was_asked_for_is_asked_about_at_any_size() -> None:
    """And cannot be replaced by bytes."""
    async with running_daemon(daemon=AskedDaemon()) as daemon, AsyncClient(daemon.target) as client:
        assert isinstance(daemon, AskedDaemon)
        with refuses(UnsupportedError):
            await client.push_weights(weights(1), version=1, shared_memory=True)
        assert (len(daemon.deadlines_s), daemon.streams) == (1, [])


@pytest.mark.parametrize(
    ("timeouts", "options", "deadline_s"),
    [
        (Timeouts(control_s=30, push_s=90), {}, 30),
        (Timeouts(control_s=90, push_s=30), {}, 30),
        (Timeouts(control_s=90), {"timeout_s": 30}, 30),
        (Timeouts(control_s=30), {"timeout_s": None}, 30),
        (Timeouts(control_s=None, push_s=30), {}, 30),
        (Timeouts(control_s=None, push_s=None), {}, None),
    ],
)
@pytest.mark.usefixtures("small_limits")
async def test_the_question_takes_no_longer_than_a_call_and_than_the_push(
    timeouts: Timeouts, options: dict[str, Any], deadline_s: float | None
) -> None:
    """None is no limit."""
    async with running_daemon(daemon=AskedDaemon()) as daemon, AsyncClient(daemon.target, timeouts=timeouts) as client:
        assert isinstance(daemon, AskedDaemon)
        await client.push_weights(weights(HAS_PORTS_BYTES), version=1, **options)
        (asked_s,) = daemon.deadlines_s
        if deadline_s is None or asked_s is None:
            assert asked_s is deadline_s
        else:
            assert deadline_s - 20 < asked_s < deadline_s + 0.5


@pytest.mark.usefixtures("small_limits")
async def test_bytes_go_to_the_ports_that_the_daemon_tells() -> None:
    """Each stream to one."""
    async with (
        running_daemon(daemon=AskedDaemon()) as daemon,
        running_daemon() as other,
        AsyncClient(daemon.target) as client,
    ):
        assert isinstance(daemon, AskedDaemon)
        daemon.ingest_ports = [int(other.target.rpartition(":")[2])]
        await client.push_weights(weights(HAS_PORTS_BYTES), version=1)
        assert (daemon.streams, other.streams) == ([], [[(0, HAS_PORTS_BYTES)]])


async def test_bytes_that_were_refused_are_not_sent_again() -> None:
    """Only memory is replaced by bytes, whatever field the daemon names."""
    refused: list[Any] = []

    async def refuse_the_segment(context: Any) -> None:
        refused.append(context)
        violation = error_details_pb2.BadRequest.FieldViolation(field="segment.path", description="no")
        details = error_details_pb2.BadRequest(field_violations=[violation])
        await refuse(context, code_pb2.INVALID_ARGUMENT, "INVALID_FIELD", "no", details)

    async with running_daemon() as daemon, AsyncClient(daemon.target) as client:
        daemon.fail = refuse_the_segment
        with pytest.raises(InvalidFieldError):
            await client.push_weights(weights(1), version=1)
        assert len(refused) == 1
