"""What the daemon takes back from a front end that has died."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from vllm.utils.network_utils import make_zmq_listener

from genserve.engine.vllm.clients import seat as seats
from genserve.engine.vllm.clients.rows import ClientRows
from genserve.engine.vllm.clients.seat import Invitation, Seat, place_of
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.loras import LiveLoras
from genserve.engine.vllm.requests.intake import IntakeLimits
from genserve.engine.vllm.start.clients import ClientPlace
from genserve.errors import LoraNotFoundError
from genserve.memory.id_table import IdTable
from genserve.worker.contract.calls import Ack


class Workers:
    """Ranks that load and remove every adapter. `steps` are the calls."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    async def step(self, method: str, message: Any, timeout_s: float) -> None:
        """Succeeds."""
        self.steps.append(method)

    async def acks(self, kind: type[Ack], method: str, message: Any, timeout_s: float) -> list[Ack]:
        """Succeeds."""
        self.steps.append(method)
        return [kind("dp0:pp0:pcp0:tp0", message["nonce"], "")]


class Core:
    """EngineCore, as its clients see it: notes whom it was told to abort."""

    def __init__(self) -> None:
        self.aborted: list[list[str]] = []

    async def call_utility_all_async(self, method: str, ids: list[str]) -> list[None]:
        """As vLLM's."""
        assert method == "abort_requests"
        self.aborted.append(ids)
        return [None]


class Files:
    """An adapter's files."""

    directory, rank, size_bytes, source, push_id = "/adapter", 8, 100, "test", ""

    def close(self) -> None:
        """Nothing to free."""


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def loras() -> LiveLoras:
    workers: Any = Workers()
    return LiveLoras(workers, 4)


@pytest.fixture
def rows() -> Iterator[ClientRows]:
    rows = ClientRows.create(3, 1)
    yield rows
    rows.close()


@pytest.fixture
def seat(core: Core, loras: LiveLoras, rows: ClientRows, tmp_path: Path) -> Iterator[Seat]:
    listeners = [make_zmq_listener(f"ipc://{tmp_path}/{name}", zmq.PULL) for name in ("requests", "outputs")]
    llm: Any = SimpleNamespace(engine_core=core, vllm_config=SimpleNamespace(name="configuration"))
    info: Any = SimpleNamespace(model="m")
    place = ClientPlace(2, 3, listeners[0], listeners[1], "ipc://stats")
    seat = Seat(place, llm, Liveness(), rows, loras, ("generate",), info, IntakeLimits(8, 2), with_series=True)
    yield seat
    seat.close()


@pytest.mark.parametrize("own_id", ["r", "2/r"])
async def test_an_adapter_is_in_use_until_the_request_or_its_front_end_has_ended(
    seat: Seat, loras: LiveLoras, own_id: str
) -> None:
    """The daemon's own request of the same id has nothing to do with it; nor of an id that looks like a place's."""
    files: Any = Files()
    await loras.load("x", files, 10.0)
    own = await loras.use("x", own_id)
    assert await seat.use_adapter("x", "r") == own
    await seat.use_adapter("x", "s")
    assert loras.loaded()[0].num_requests == 3
    seat.release_adapter("r")
    seat.release_adapter("unknown")
    assert loras.loaded()[0].num_requests == 2
    seat.vacate()
    assert loras.loaded()[0].num_requests == 1
    loras.release(own_id)
    assert loras.loaded()[0].num_requests == 0
    with pytest.raises(LoraNotFoundError):
        await seat.use_adapter("y", "r")
    seat.vacate()


async def test_what_a_front_end_left_is_aborted_twice_and_counts_no_more(
    seat: Seat, core: Core, rows: ClientRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first abort may come before a request that was on its way. The next process begins with nothing."""
    monkeypatch.setattr(seats, "ON_ITS_WAY_S", 0.01)
    writer = IdTable(seat.fds[3])
    for number in range(3):
        writer.add(f"id{number}", {"id0", "id1", "id2"})
    rows.tally(2).publish(5, 3)
    assert seat.num_requests == 3
    left = seat.vacate()
    assert sorted(left) == ["id0", "id1", "id2"]
    assert seat.num_requests == 0
    assert seat.vacate() == []
    await asyncio.wait_for(seat.abort(left), 30)
    assert core.aborted == [left, left]
    await seat.abort([])
    assert core.aborted == [left, left]


def test_an_invitation_names_all_that_a_process_needs(seat: Seat) -> None:
    """The sockets are those that the daemon listens on. Anything else is refused."""
    invitation = Invitation.from_bytes(seat.invitation)
    assert (invitation.index, invitation.count, invitation.limits) == (2, 3, IntakeLimits(8, 2))
    assert invitation.tasks == ("generate",)
    place = place_of(invitation, *seat.fds[:2])
    try:
        assert place.requests.socket.family == socket.AF_UNIX
        assert f"ipc://{place.requests.socket.getsockname()}" == place.requests.address
        assert (place.index, place.count, place.stats_address) == (2, 3, "ipc://stats")
    finally:
        place.requests.socket.detach()
        place.outputs.socket.detach()
    with pytest.raises(TypeError, match="is not an invitation"):
        Invitation.from_bytes(b"\x80\x04N.")
