"""A place at the engine and whoever sits there: what the daemon hands to the process, does for it, and takes back when
it has died."""

import asyncio
import pickle
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import cloudpickle
from vllm.config import VllmConfig
from vllm.utils.network_utils import ZmqListener
from vllm.v1.engine.async_llm import AsyncLLM

from genserve.engine.types import EngineInfo, UsedAdapter
from genserve.engine.vllm.clients.rows import ClientRows
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.loras import LiveLoras
from genserve.engine.vllm.requests.intake import IntakeLimits
from genserve.engine.vllm.start.clients import ClientPlace
from genserve.memory.id_table import IdTable, ids_in

_ABORT_TIMEOUT_S = 60.0
# A request may still be on its way to EngineCore when its sender has died.
ON_ITS_WAY_S = 1.0


@dataclass(frozen=True, slots=True)
class Invitation:
    """The data that a process needs to join, beside the descriptors of the seat. `config` is the engine's after its
    start, and `tasks` are what it says that it can do. `with_series`: it counts vLLM's series."""

    config: VllmConfig
    tasks: tuple[str, ...]
    info: EngineInfo
    limits: IntakeLimits
    index: int
    count: int
    requests_address: str
    outputs_address: str
    stats_address: str | None
    with_series: bool

    def to_bytes(self) -> bytes:
        """For a process with the same code."""
        # vLLM's configuration may contain classes that came with the model.
        return bytes(cloudpickle.dumps(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Invitation":
        """The invitation, in the other process."""
        invitation = pickle.loads(data)
        if not isinstance(invitation, Invitation):
            raise TypeError(f"{type(invitation).__name__} is not an invitation")
        return invitation


class Seat:
    """One place. `index` is the client's number."""

    def __init__(
        self,
        place: ClientPlace,
        llm: AsyncLLM,
        liveness: Liveness,
        rows: ClientRows,
        loras: LiveLoras,
        tasks: tuple[str, ...],
        info: EngineInfo,
        limits: IntakeLimits,
        *,
        with_series: bool,
    ) -> None:
        self.index = place.index
        self._place = place
        self._llm = llm
        self._liveness = liveness
        self._rows = rows
        self._row = rows.row(place.index)
        self._loras = loras
        self._tasks = tasks
        self._info = info
        self._limits = limits
        self._with_series = with_series
        self._ids = IdTable.create()
        self._used: set[tuple[int, str]] = set()

    @property
    def fds(self) -> Sequence[int]:
        """The descriptors that the process inherits: for requests, outputs, the rows of all clients, and its ids."""
        return self._place.requests.socket.fileno(), self._place.outputs.socket.fileno(), self._rows.fd, self._ids.fd

    @property
    def invitation(self) -> bytes:
        """The data that the process needs to join."""
        return Invitation(
            self._llm.vllm_config,
            self._tasks,
            self._info,
            self._limits,
            self._place.index,
            self._place.count,
            self._place.requests.address,
            self._place.outputs.address,
            self._place.stats_address,
            self._with_series,
        ).to_bytes()

    @property
    def num_requests(self) -> int:
        """Requests of the process that are admitted and unfinished."""
        return self._row.num_requests

    async def use_adapter(self, name: str, request_id: str) -> UsedAdapter:
        """The adapter of one of its requests, until `release_adapter`. Raises LoraNotFoundError."""
        key = (self.index, request_id)  # no id of a request of the daemon's own
        used = await self._loras.use(name, key)
        self._used.add(key)
        return used

    def release_adapter(self, request_id: str) -> None:
        """Records that the request has ended."""
        key = (self.index, request_id)
        self._used.discard(key)
        self._loras.release(key)

    def vacate(self) -> list[str]:
        """Records that the process has died: nothing of it counts any more. Returns the ids of its sequences, for
        `abort`. Call before another process joins."""
        ids = list(ids_in(self._ids.fd))
        self._ids.clear()
        self._rows.vacate(self.index)
        for key in self._used:
            self._loras.release(key)
        self._used.clear()
        return ids

    async def abort(self, ids: Sequence[str]) -> None:
        """Ends what a process that has died left in the engine."""
        if not ids:
            return
        for _ in range(2):
            await self._liveness.call(
                # To every engine: only the process knew which one has a request. Those that are over do not matter.
                self._llm.engine_core.call_utility_all_async("abort_requests", list(ids)),
                what="end of another client's requests",
                timeout_s=_ABORT_TIMEOUT_S,
                occupies=False,
            )
            await asyncio.sleep(ON_ITS_WAY_S)

    def close(self) -> None:
        """Frees its memory."""
        self._ids.close()


def place_of(invitation: Invitation, requests_fd: int, outputs_fd: int) -> ClientPlace:
    """The place, in the process that joins."""
    requests = ZmqListener(invitation.requests_address, socket.socket(fileno=requests_fd))
    outputs = ZmqListener(invitation.outputs_address, socket.socket(fileno=outputs_fd))
    return ClientPlace(invitation.index, invitation.count, requests, outputs, invitation.stats_address)
