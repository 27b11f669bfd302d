"""Starts, restarts and ends the front ends for the daemon, and speaks to all of them."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from genserve.control.state import StateBoard
from genserve.engine.types import WAIT_PATIENCE_S
from genserve.frontends import settings as questions
from genserve.frontends.frontend import ANSWER_TIMEOUT_S, Abort, FrontEnd, Seat
from genserve.frontends.settings import FrontendSettings, ids_to_values
from genserve.frontends.template import Template

_MAX_DEATHS = 4
_DEATHS_WITHIN_S = 120.0
_FIRST_DELAY_S = 0.25
_CHECK_INTERVAL_S = 5.0
_ALIVE_TIMEOUT_S = 30.0
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
                await asyncio.wait({change}, timeout=_CHECK_INTERVAL_S)
                if change.done():
                    change = asyncio.ensure_future(self._board.wait_change())
                await frontend.ask(questions.CHANGED, timeout_s=_ALIVE_TIMEOUT_S)
        finally:
            change.cancel()


class FrontEnds(Asked):
    """One front end at each seat, forked from `template`. `abort` ends requests of any client; `say` prints messages
    for people."""

    def __init__(
        self,
        template: Template,
        seats: Sequence[Seat],
        settings: FrontendSettings,
        board: StateBoard,
        abort: Abort,
        say: Callable[[str], None],
    ) -> None:
        named = [(seat, replace(settings, name=f"frontend-{index}")) for index, seat in enumerate(seats)]
        super().__init__(board, [FrontEnd(template, seat, each, abort, say) for seat, each in named])
        self._say = say
        self._down: set[FrontEnd] = set()

    def live_ports(self) -> tuple[int, ...]:
        """The ports of those that serve, or will again."""
        return tuple(each.port for each in self._all if each not in self._down)

    def num_down(self) -> int:
        """Those that ended again and again, and are not started any more."""
        return len(self._down)

    async def start(self) -> None:
        """Starts all processes. Raises RuntimeError if one does not start."""
        started = await asyncio.gather(*(each.start() for each in self._all), return_exceptions=True)
        for error in started:
            if error is not None:
                raise error

    async def run(self) -> None:
        """Tells them of changes, and restarts those that end. Never returns. One that ends four times within two
        minutes stays down: the daemon and the others serve without it."""
        async with asyncio.TaskGroup() as group:
            for each in self._all:
                group.create_task(self._keep(each))
                group.create_task(self._tell_changes(each))

    async def stop(self) -> None:
        """Ends all of them."""
        await asyncio.gather(*(each.stop() for each in self._all))

    async def _keep(self, frontend: FrontEnd) -> None:
        clock = asyncio.get_running_loop().time
        died_at: deque[float] = deque(maxlen=_MAX_DEATHS)
        while True:
            await frontend.wait_ended()
            died_at.append(clock())
            recent = [at for at in died_at if at > died_at[-1] - _DEATHS_WITHIN_S]
            if len(recent) == _MAX_DEATHS:
                self._down.add(frontend)
                self._say(f"the front end on port {frontend.port} has ended again and again; it stays down")
                return
            self._say(f"the front end on port {frontend.port} has ended; it is started again")
            await asyncio.sleep(_FIRST_DELAY_S * 2 ** (len(recent) - 1))
            try:
                await frontend.start()
            except (OSError, RuntimeError) as error:
                self._say(str(error))  # it has been killed, and counts as one that has ended


async def _wait_idle(frontend: FrontEnd) -> None:
    while True:
        answer = await frontend.ask(questions.IDLE, timeout_s=_IDLE_TIMEOUT_S)
        if answer is None or answer["idle"]:
            return
