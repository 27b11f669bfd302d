"""One front end: what a process does that the daemon's template has forked.

The composition root of this process, as `serve` is of the daemon. It joins the engine as a client, serves
GenerationService on its own port, and ends with the daemon.
"""

import asyncio
import socket
from collections.abc import Sequence

import grpc.aio
import uvloop

from genserve.control.conditions import Phase
from genserve.daemon.parts import observers_of
from genserve.engine.types import UsedAdapter
from genserve.engine.vllm.clients.frontend import FrontendEngine, begin
from genserve.errors import GenserveError
from genserve.frontends import questions
from genserve.frontends.link import Link, Message
from genserve.frontends.questions import Answers, FrontendSettings, ids_to_values
from genserve.frontends.state import SharedState
from genserve.memory.allocator import freeze_objects
from genserve.memory.words import SharedWords
from genserve.metrics.process import ProcessMetrics
from genserve.observe.log_lines import write_log_lines
from genserve.rpc.generation import abort_elsewhere
from genserve.rpc.listener import bind
from genserve.rpc.server import frontend_server
from genserve.security.access_list import AccessSource, open_access_list
from genserve.settings.config import ServeConfig

_GRACE_S = 2.0
_ANSWER_TIMEOUT_S = 10.0
_ABORT_TIMEOUT_S = 20.0  # the daemon asks all front ends, each for half of this time at most


def run(config: ServeConfig, callers: AccessSource, settings: FrontendSettings) -> int:
    """Serves until the daemon says stop, or ends; the exit status. `config` is the daemon's, and so are `callers`."""
    begin(settings.daemon_pid)
    uvloop.run(serve(config, callers, settings))
    return 0


async def serve(config: ServeConfig, callers: AccessSource, settings: FrontendSettings) -> None:
    """Answers the daemon until it has said stop, or has ended."""
    frontend = _FrontEnd(config, callers, settings)
    await frontend.link.open()
    measuring = asyncio.create_task(frontend.measure(), name="measuring")
    try:
        await frontend.link.run()
    finally:
        measuring.cancel()
        await frontend.close()


class LinkedAdapters:
    """The daemon's LoRA adapters, for requests of this process."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._used: set[str] = set()

    async def use(self, name: str, request_id: str) -> UsedAdapter:
        """The adapter of a request, until `release`. Raises LoraNotFoundError."""
        self._used.add(request_id)
        values = {"name": name, "request_id": request_id}
        answer = await self._link.ask_for_client(questions.USE_ADAPTER, Message(values), timeout_s=_ANSWER_TIMEOUT_S)
        return UsedAdapter(**answer.values)

    def release(self, request_id: str) -> None:
        """Records that the request has ended."""
        if request_id in self._used:
            self._used.remove(request_id)
            self._link.tell(questions.RELEASE_ADAPTER, Message({"request_id": request_id}))


class _FrontEnd:
    """The engine, the server and the link of this process."""

    def __init__(self, config: ServeConfig, callers: AccessSource, settings: FrontendSettings) -> None:
        self._config = config
        self._callers = callers
        self._settings = settings
        self._metrics = ProcessMetrics.of_frontend(settings.metrics_directory, settings.name)
        self._state = SharedState(SharedWords(settings.state_fd))
        self._engine: FrontendEngine | None = None
        self._server: grpc.aio.Server | None = None
        self._answers = Answers()
        self.link = Link(
            socket.socket(fileno=settings.link_fd),
            {
                questions.JOIN: self._join,
                questions.SERVE: self._serve,
                questions.CHANGED: self._changed,
                **self._answers.handlers,
                questions.STOP: self._stop,
            },
        )

    async def _join(self, message: Message) -> Message:
        state = self._state
        self._engine = self._answers.joined = await FrontendEngine.join(
            message.data, self._settings.seat_fds, LinkedAdapters(self.link), lambda: state.weight_version
        )
        write_log_lines()  # vLLM has configured its logging anew
        abort = abort_elsewhere(self._abort_everywhere)
        config = self._config
        observers = observers_of(self._metrics, traced=self._engine.is_traced)
        try:
            listed = open_access_list(self._callers)
            self._server = frontend_server(self._engine, state, abort, config, listed, observers)
            address = bind(self._server, config.host, self._settings.port, "", config.certificate)
        except (OSError, ValueError) as error:
            raise GenserveError(str(error)) from error
        freeze_objects()
        return Message({"port": int(address.rpartition(":")[2])})

    async def _serve(self, message: Message) -> Message:
        if self._server is not None:
            await self._server.start()
        return Message()

    async def _abort_everywhere(self, request_ids: Sequence[str] | None) -> bytes:
        """Only the daemon reaches all clients, and knows the state."""
        asked = Message(ids_to_values(request_ids))
        return (await self.link.ask_for_client(questions.ABORT, asked, timeout_s=_ABORT_TIMEOUT_S)).data

    async def _changed(self, message: Message) -> Message:
        self._look()
        return Message()

    def _look(self) -> None:
        self._state.notify()
        if self._engine is not None and self._state.phase is Phase.DEAD:
            self._engine.declare_dead(self._state.cause_of_death or "the daemon has given it up")

    async def _stop(self, message: Message) -> Message:
        self._look()  # a daemon that fails may not have told it: streams end with the reason, not with the grace period
        if self._server is not None:
            await self._server.stop(_GRACE_S)
        asyncio.get_running_loop().call_soon(self.link.close)
        return Message()

    async def measure(self) -> None:
        """Measures the event loop, if the daemon shows it."""
        if self._metrics is not None:
            await self._metrics.run()

    async def close(self) -> None:
        """Ends what still runs: the daemon has ended, or has said stop."""
        if self._server is not None:
            await self._server.stop(0.0)
        if self._engine is not None:
            self._engine.close()
