"""Joins an engine that runs already, as one of its clients.

EngineCore tells each client once, at its start, that it is ready, and vLLM's client waits for this. A client that
joins later, after the one at its place has died, would wait in vain. So vLLM's client is made on a socket of its own,
where this module says that the engine is ready. Then the socket listens at its place too, EngineCore connects, and
takes the place of the one that has said so.
"""

import asyncio
import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from vllm.config import VllmConfig
from vllm.envs import enable_envs_cache
from vllm.utils.network_utils import ZmqListener, get_open_zmq_ipc_path
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from zmq.utils.monitor import recv_monitor_message

from genserve.engine.vllm.clients.rows import ClientRow, ClientRows, RowTally
from genserve.engine.vllm.clients.seat import Invitation, place_of
from genserve.engine.vllm.start.clients import ClientPlace, stat_loggers
from genserve.errors import UnavailableError
from genserve.memory.id_table import IdTable
from genserve.memory.words import SharedWords

_CONNECT_TIMEOUT_S = 60.0
_READY = b""
"""vLLM takes it for an engine that has changed no setting. The daemon's configuration has the changes already."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A client of the engine: vLLM's own, the invitation that it accepted, the row that it publishes, and the tally of
    all clients."""

    llm: Any
    invitation: Invitation
    row: ClientRow
    tally: RowTally


async def join_at_seat(data: bytes, fds: Sequence[int], llm_class: type[AsyncLLM] = AsyncLLM) -> Joined:
    """Joins the engine that an invitation is for, with the descriptors of the seat. `llm_class`: of vLLM's client.
    Raises UnavailableError."""
    invitation = Invitation.from_bytes(data)
    requests_fd, outputs_fd, rows_fd, ids_fd = fds
    parallel = invitation.config.parallel_config
    rows = ClientRows(SharedWords(rows_fd), invitation.count, parallel.data_parallel_size)
    ids = IdTable(ids_fd)
    place = place_of(invitation, requests_fd, outputs_fd)
    # internal: with several clients none of them may rely on what EngineCore keeps of its images.
    parallel._api_process_count, parallel._api_process_rank = place.count, place.index
    row = rows.row(place.index)
    loggers = stat_loggers(row, with_series=invitation.with_series)
    llm = await join(invitation.config, invitation.tasks, place, loggers, rows.counters, ids, llm_class)
    enable_envs_cache()  # vLLM asks the environment about something for every token
    return Joined(llm, invitation, row, rows.tally(place.index))


async def join(
    config: VllmConfig,
    tasks: tuple[str, ...],
    place: ClientPlace,
    stat_loggers: Sequence[Any],
    counters: Any,
    ids: IdTable,
    llm_class: type[AsyncLLM] = AsyncLLM,
) -> Any:
    """The client at a place, once every engine listens to it. `config` is that of the daemon's client after the start,
    and `tasks` are what this client was told of the engine. The engine is asked nothing: it may be amid a long step or
    a commit; and vLLM's client takes an answer that its predecessor waited for as the death of the engine.

    `counters` is memory of all clients in which vLLM counts their unfinished requests. `ids` has the id of each
    sequence before EngineCore gets it. Raises UnavailableError if an engine does not connect.
    """
    llm = _client(config, place, stat_loggers, counters, llm_class)
    try:
        await _listen(llm, place.requests)
    except BaseException:
        llm.shutdown(0.0)
        raise
    llm._supported_tasks = tasks  # internal: AsyncLLM.get_supported_tasks asks the engine if this is not there
    core: Any = NotedCore(llm.engine_core, ids, llm.output_processor.request_states)
    llm.engine_core = core
    return llm


class NotedCore:
    """All of vLLM's client of EngineCore, which writes the id of each sequence into `ids` before EngineCore gets it.
    `unfinished`: vLLM's, by id."""

    # internal: AsyncLLM gives a request its ids in the same call that sends it.
    def __init__(self, core: Any, ids: IdTable, unfinished: Container[str]) -> None:
        self._core = core
        self._ids = ids
        self._unfinished = unfinished

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """As AsyncMPClient.add_request_async."""
        self._ids.add(request.request_id, self._unfinished)
        await self._core.add_request_async(request)


def _client(
    config: VllmConfig, place: ClientPlace, stat_loggers: Sequence[Any], counters: Any, llm_class: type[AsyncLLM]
) -> AsyncLLM:
    address = get_open_zmq_ipc_path()
    addresses = {
        "input_address": address,
        "output_address": place.outputs.address,
        "output_listener": place.outputs.socket,
        "stats_update_address": place.stats_address,
        "mp_admission_counters": counters,
    }
    parallel = config.parallel_config
    # internal: how EngineCore identifies itself, as in MPClient.__init__.
    identities = [rank.to_bytes(2, "little") for rank in range(parallel.data_parallel_size)]
    done = threading.Event()
    saying = threading.Thread(target=_say_ready, args=(address, identities, done), name="genserve-ready", daemon=True)
    saying.start()
    try:
        llm = llm_class.from_vllm_config(
            config,
            stat_loggers=list(stat_loggers),
            disable_log_stats=True,
            client_addresses=addresses,
            client_count=place.count,
            client_index=place.index,
        )
    finally:
        done.set()
        saying.join()
    llm.engine_core.input_socket.unbind(address)
    return llm


def _say_ready(address: str, identities: list[bytes], done: threading.Event) -> None:
    """Sends the messages with which EngineCore says that it has started, one for each engine."""
    with zmq.Context() as context:
        sockets = []
        for identity in identities:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            socket.send(_READY)
            sockets.append(socket)
        done.wait()
        for socket in sockets:
            socket.close()


async def _listen(llm: AsyncLLM, listener: ZmqListener) -> None:
    """Takes requests to the engine from here on. Returns when each engine has connected."""
    # internal: vLLM's socket of this name, on which it knows engines by their identities.
    socket: zmq.asyncio.Socket = llm.engine_core.input_socket
    num_engines = len(llm.engine_core.core_engines)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.USE_FD, listener.socket.detach())
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        socket.bind(listener.address)
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            for _ in range(num_engines):
                await recv_monitor_message(monitor)
    except TimeoutError:
        raise UnavailableError("the engine does not connect to its new client") from None
    finally:
        socket.disable_monitor()
