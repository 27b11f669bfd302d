"""Asks the daemon or the router, and updates the screen: watches that call again, and the commands of the user.

Everything has a deadline, and nothing waits for anything else: a daemon that is lost, silent or refuses is shown so.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypeVar

from genserve.aio import Backoff, silence
from genserve.cli.options import default_holder
from genserve.cli.top.lines import Tone
from genserve.cli.top.questions import Action, Kind
from genserve.cli.top.screen import LinkState, Screen
from genserve.errors import (
    GenserveError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from genserve.cli.top.screen import Transfer
    from genserve.client import AsyncClient, ResponseStream, Status

T = TypeVar("T")

MIN_INTERVAL_S: Final = 0.1
_ASK_S: Final = 5.0
_COMMAND_S: Final = 10.0
_MAX_ASKING: Final = 32
_DRAIN_REPLICA_S: Final = 300.0
_FIRST_RETRY_S: Final = 0.25
_MAX_RETRY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds. `interval_s`: how often news are wanted; a daemon that says nothing for `silence_s` is lost."""

    interval_s: float = 0.5
    silence_s: float = 5.0


class Feed:
    """Keeps a screen up to date. `clock` gives the seconds that the screen counts in."""

    def __init__(
        self,
        client: "AsyncClient",
        screen: Screen,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._screen = screen
        self._pace = pace
        self._clock = clock
        self._connected = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Watches until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_status())
                group.create_task(self._watch_replicas())
        finally:
            for task in self._asking:
                task.cancel()

    async def once(self) -> None:
        """Asks everything once. Raises the GenserveError of the status; what else is refused is shown so."""
        self._took(await self._client.status(timeout_s=_ASK_S))
        await self._ask_info()
        try:
            self._screen.took_replicas(await self._client.list_replicas(timeout_s=_ASK_S))
        except UnsupportedError:
            self._screen.has_no_replicas()
        except GenserveError as error:
            self._screen.replicas_problem = said(error)
        self._screen.sample(self._clock())

    async def carry_out(self, action: Action) -> None:
        """Does what the user has confirmed, and shows what was answered."""
        screen = self._screen
        screen.pending.append(action.label)
        try:
            text = await self._answer(action)
        except GenserveError as error:
            if isinstance(error, PermissionDeniedError | UnauthenticatedError):
                screen.refused.add(action.kind.value)
            screen.note(f"{action.label}: {said(error)}", Tone.BAD, self._clock())
        else:
            screen.refused.discard(action.kind.value)
            screen.note(f"{action.label}: {text}", Tone.GOOD, self._clock())
        finally:
            screen.pending.remove(action.label)

    async def _answer(self, action: Action) -> str:
        match action.kind:
            case Kind.PAUSE:
                return await self._pause(action)
            case Kind.RESUME:
                return await self._resume(action)
            case Kind.DRAIN if not action.address:
                state = await self._client.drain(timeout_s=_COMMAND_S)
                return f"it is {state.phase}, and ends when its requests have"
            case Kind.DRAIN:
                await self._client.drain_replica(action.address, timeout_s=_DRAIN_REPLICA_S)
                return "its requests have ended, and it is removed"

    async def _pause(self, action: Action) -> str:
        paused = await self._client.pause(
            action.mode, holder=default_holder(), ttl_s=self._screen.pause_ttl_s, timeout_s=_COMMAND_S
        )
        self._screen.own_leases.append(paused.lease.lease_id)
        return f"it is {paused.state.phase}; requests kept {paused.requests_kept}, ended {paused.requests_aborted}"

    async def _resume(self, action: Action) -> str:
        if not action.lease_ids:
            resumed = await self._client.resume(force=True, timeout_s=_COMMAND_S)
            return f"it is {resumed.state.phase}"
        phase = ""
        for lease_id in action.lease_ids:
            resumed = await self._client.resume(lease_id, timeout_s=_COMMAND_S)
            phase = f"it is {resumed.state.phase}{'; the lease had expired' if resumed.lease_expired else ''}"
        return phase

    # --- watching

    async def _watch_status(self) -> None:
        interval_s = self._pace.interval_s
        while True:
            try:
                await self._follow(
                    lambda: self._client.watch_status(interval_s=interval_s, heartbeat_s=interval_s),
                    self._took,
                    self._lost,
                )
            except UnsupportedError as error:  # neither a daemon nor a router, or an old one
                self._lost(error)
            await asyncio.sleep(_MAX_RETRY_S)

    async def _watch_replicas(self) -> None:
        interval_s = self._pace.interval_s
        while True:
            await self._connected.wait()
            self._connected.clear()
            with suppress(UnsupportedError):
                await self._follow(
                    lambda: self._client.watch_replicas(interval_s=interval_s),
                    self._screen.took_replicas,
                    self._lost_replicas,
                )
            self._screen.has_no_replicas()  # until another one answers at this address

    async def _follow(
        self,
        watch: "Callable[[], ResponseStream[T]]",
        take: Callable[[T], None],
        lost: Callable[[GenserveError], None],
    ) -> None:
        """Watches, and calls again after a pause whenever it ends. Raises UnsupportedError."""
        backoff = Backoff(_FIRST_RETRY_S, _MAX_RETRY_S)
        while True:
            try:
                async with watch() as told:
                    while True:
                        take(await self._next(told))
                        backoff.reset()
            except UnsupportedError:
                raise
            except GenserveError as error:
                lost(error)
            await asyncio.sleep(backoff.next_s())

    async def _next(self, told: "ResponseStream[T]") -> T:
        silence_s = self._pace.silence_s
        try:
            async with silence(silence_s):
                return await anext(told)
        except TimeoutError:
            raise UnavailableError(f"it has said nothing for {silence_s:g} s") from None
        except StopAsyncIteration:
            raise UnavailableError("it has shut down") from None

    def _took(self, status: "Status") -> None:
        screen, before = self._screen, self._screen.status
        is_new = screen.link.state is not LinkState.LIVE
        if before is not None and before.state.instance_id != status.state.instance_id:
            is_new = True
        # While it starts it does not tell what it serves.
        has_started = before is not None and before.state.phase == "starting" != status.state.phase
        gone = screen.took_status(status, self._clock(), datetime.now(UTC))
        for transfer in gone:
            if len(self._asking) < _MAX_ASKING:
                self._ask(self._ask_outcome(transfer))
            else:
                screen.push_ended(transfer, None)
        if is_new:
            self._connected.set()
        if is_new or has_started:
            self._ask(self._ask_info())

    def _lost(self, error: GenserveError) -> None:
        self._screen.lost(said(error), self._clock())

    def _lost_replicas(self, error: GenserveError) -> None:
        self._screen.replicas_problem = said(error)

    # --- what is asked once

    def _ask(self, asking: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(asking)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask_info(self) -> None:
        """Asks what is served. A refusal is not shown: the status is enough."""
        try:
            self._screen.took_info(await self._client.server_info(timeout_s=_ASK_S))
        except GenserveError:
            self._screen.took_info(None)

    async def _ask_outcome(self, transfer: "Transfer") -> None:
        """Asks for the outcome of a push that is no longer in flight."""
        result = None
        with suppress(GenserveError):
            result = await self._client.get_push(transfer.push.push_id, timeout_s=_ASK_S)
        self._screen.push_ended(transfer, result)


def said(error: GenserveError) -> str:
    """An error as the command line prints it."""
    return f"{error.metadata.get('reason', error.reason)}: {' '.join(error.message.split())}"
