"""The front ends of the daemon, and its OpenAI server: starts them, keeps them going, ends them, and speaks to them."""

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from genserve.control.state import StateBoard
from genserve.engine.types import WAIT_PATIENCE_S
from genserve.frontends import questions
from genserve.frontends.frontend import ANSWER_TIMEOUT_S, Abort, FrontEnd, Seat, Starter
from genserve.frontends.questions import FrontendSettings, ids_to_values
from genserve.frontends.template import Template
from genserve.net import joined
from genserve.process.supervisor import start_all

OPENAI_START_TIMEOUT_S = 600.0
CHECK_INTERVAL_S = 5.0
ALIVE_TIMEOUT_S = 30.0
_WAIT_TIMEOUT_S = WAIT_PATIENCE_S + 10.0
_IDLE_TIMEOUT_S = questions.IDLE_PATIENCE_S + 10.0


class Asked:
    """Processes that the daemon asks about their requests, as OtherClients. Each is also notified when `board`
    changes."""

    def __init__(self, board: StateBoard, all_of_them: Sequence[FrontEnd]) -> None:
        self._board = board
        self._all = all_of_them

    @property
    def num_requests(self) -> int:
        """Requests that are admitted and unfinished."""
        return sum(each.num_requests for each in self._all)

    async def abort(self, request_ids: Sequence[str] | None) -> list[str]:
        """Ends requests (None = all) with reason ABORTED; the ids that ran."""
        answers = await self._ask_all(questions.ABORT, for_client=ids_to_values(request_ids))
        return [request_id for answer in answers for request_id in answer["aborted_ids"]]

    async def pausing(self) -> int:
        """Requests that the engine aborts from now on end as PAUSED. How many there are."""
        return sum(answer["num_requests"] for answer in await self._ask_all(questions.PAUSING))

    async def paused(self) -> None:
        """The engine has aborted them."""
        await self._ask_all(questions.PAUSED)

    def interrupted(self) -> "asyncio.Future[int]":
        """Nothing is scheduled: each watches its sequences from now on. Tokens that these have computed."""
        return asyncio.create_task(self._interrupted(), name="tokens that an update interrupted")

    async def _interrupted(self) -> int:
        return sum(answer["num_computed_tokens"] for answer in await self._ask_all(questions.INTERRUPTED))

    async def longest_wait_s(self) -> float | None:
        """The longest time that a watched sequence was without output, when all have output again or have ended; None
        if none was."""
        answers = await self._ask_all(questions.LONGEST_WAIT, timeout_s=_WAIT_TIMEOUT_S)
        waits = [answer["longest_wait_s"] for answer in answers]
        return max((each for each in waits if each is not None), default=None)

    async def wait_idle(self) -> None:
        """Returns when no request is left."""
        await asyncio.gather(*map(_wait_idle, self._all))

    async def _ask_all(
        self, question: str, timeout_s: float = ANSWER_TIMEOUT_S, *, for_client: Any = None
    ) -> list[Any]:
        answers = await asyncio.gather(*(each.ask(question, timeout_s, for_client=for_client) for each in self._all))
        return [answer for answer in answers if answer is not None]

    async def _tell_changes(self, frontend: FrontEnd) -> None:
        change = asyncio.ensure_future(self._board.wait_change())
        try:
            while True:
                await asyncio.wait({change}, timeout=CHECK_INTERVAL_S)
                if change.done():
                    change = asyncio.ensure_future(self._board.wait_change())
                await frontend.ask(questions.CHANGED, timeout_s=ALIVE_TIMEOUT_S)
        finally:
            change.cancel()


class FrontEnds(Asked):
    """One front end at each seat, forked from `template`. `abort` ends requests of any client."""

    def __init__(
        self,
        template: Template,
        seats: Sequence[Seat],
        settings: FrontendSettings,
        board: StateBoard,
        abort: Abort,
    ) -> None:
        named = [(seat, replace(settings, name=f"frontend-{index}")) for index, seat in enumerate(seats)]
        super().__init__(board, [FrontEnd(template, seat, each, abort) for seat, each in named])

    def live_ports(self) -> tuple[int, ...]:
        """The ports of those that serve, or will again."""
        return tuple(each.port for each in self._all if not each.is_down)

    def num_down(self) -> int:
        """Those that ended again and again, and are not started any more."""
        return sum(each.is_down for each in self._all)

    async def start(self) -> None:
        """Starts all processes. Raises RuntimeError if one does not start."""
        await start_all(self._all)

    async def run(self) -> None:
        """Tells them of changes, and keeps them going. Never returns: the daemon and the others serve on without one
        that stays down."""
        async with asyncio.TaskGroup() as group:
            for each in self._all:
                group.create_task(each.run(serves=True))
                group.create_task(self._tell_changes(each))

    async def stop(self) -> None:
        """Ends all of them."""
        await asyncio.gather(*(each.stop() for each in self._all))


class OpenAIServer(Asked):
    """One process of the OpenAI server at a time, at a seat of the engine. `starter` starts processes that serve on
    `listener`; `scheme`: http or https. The daemon holds the listener. So the port stays the same, and clients that
    connect while no process runs wait for the next one."""

    def __init__(self, starter: Starter, listener: socket.socket, scheme: str, seat: Seat, board: StateBoard) -> None:
        self._listener = listener
        self._scheme = scheme
        self._host, self.port = listener.getsockname()[:2]
        settings = FrontendSettings(os.getpid(), 0, -1, (), self.port)
        self._process = FrontEnd(
            starter, seat, settings, None, what="OpenAI server", start_timeout_s=OPENAI_START_TIMEOUT_S
        )
        super().__init__(board, [self._process])

    def __str__(self) -> str:
        return f"{self._scheme}://{joined(self._host, self.port)}"

    async def start(self, stopped: asyncio.Event) -> None:
        """Returns when it serves, or when the daemon is to stop. Raises RuntimeError if its process ends before, or if
        it does not serve in time."""
        starting = asyncio.create_task(start_all([self._process]))
        stopping = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
        finally:
            starting.cancel()
            stopping.cancel()
            await asyncio.wait({starting, stopping})

    async def run(self) -> None:
        """Keeps the process going, and ends one that does not answer. When it stays down nobody can connect any more,
        and the daemon serves on. Never returns."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep(), name="openai-process")
            group.create_task(self._tell_changes(self._process), name="openai-answers")

    def refuse(self) -> None:
        """Accepts no more requests. The process ends when it has answered those that it has."""
        self._close()
        self._process.finish()

    async def wait_ended(self) -> None:
        """Returns when the process has ended. May be cancelled."""
        await self._process.process_ended()

    def kill(self) -> None:
        """Ends the process at once, and starts no other one."""
        self._close()
        self._process.kill()

    async def stop(self) -> None:
        """Ends the process, and kills it if it does not end."""
        self.refuse()
        await self._process.stop()

    def _close(self) -> None:
        self._process.is_wanted = False
        self._listener.close()

    async def _keep(self) -> None:
        await self._process.run(serves=True)
        self._listener.close()


async def _wait_idle(frontend: FrontEnd) -> None:
    while True:
        answer = await frontend.ask(questions.IDLE, timeout_s=_IDLE_TIMEOUT_S)
        if answer is None or answer["idle"]:
            return
