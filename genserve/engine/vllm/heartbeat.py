"""Asks the engine once a second whether it still takes calls, and gives it up if it does not.

A ping takes the path of every call: through EngineCore's input thread and its loop, and to the workers where no step
does. EngineCore takes calls between two steps, so an unanswered ping means one of two things. Either a step takes long
(a long prefill on the CPU, a kernel that is compiled): then the processes work, and the step ends by itself. Or no
answer will ever come: the processes are stopped or idle, or steps continue although the ping is not read. This module
decides which it is. Processes that get no CPU because other programs use it all are not idle: their threads could run.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from genserve.engine.vllm.activity import Activity
from genserve.engine.vllm.liveness import Liveness
from genserve.errors import EngineDeadError

INTERVAL_S = 1.0
# A worker that hangs delays the first step, and with it the ping. So workers are pinged only while there are no steps,
# and rarely: vLLM's idle workers spin for a second after each call.
_WORKERS_INTERVAL_S = 30.0
_LOOKS_PER_TIMEOUT = 20
# Share of one core below which processes do nothing, and the share of looks below which none of their threads wants to.
# Idle processes use a hundredth of a core; a step uses a whole one, if other programs leave it one. A single look does
# not count: threads that wake each other may all seem to sleep, because they are read one after the other.
_IDLE_SHARE = 0.2
# EngineCore and its workers wake each other through ZeroMQ sockets that drop the second of two messages within a
# millisecond (vLLM's SpinCondition: a limit of one message). A process that slept on then looks again by itself, after
# 5 s (SHM_READER_RECHECK_INTERVAL_MS). Such an engine uses no CPU and answers, so it is not given up before: the ping
# may have come an interval later than the sleep began, and the step needs some time.
LOST_WAKEUP_S = 7.0
# More steps than can be running when a ping arrives, one for each pipeline-parallel rank.
_UNREAD_STEPS = 16

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeartbeatLimits:
    """`timeout_s`: seconds without an answer after which health says NOT_SERVING, and the engine is given up unless it
    works. `step_s`: seconds after which it is given up even if it works. `idle_s`: seconds for which its processes may
    do nothing and yet answer; less than `timeout_s` = none."""

    timeout_s: float
    step_s: float
    idle_s: float = LOST_WAKEUP_S


class Observed(Protocol):
    """The engine's processes. Both raise OSError if there is no descriptor left to look with: then nothing is known of
    them, and they are taken to work."""

    def any_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped one. Asked after each ping."""

    def activity(self) -> Activity:
        """The activity of the processes. Called only while an answer is late."""


class Heartbeat:
    """Pings an engine. `ping` returns when EngineCore has answered, and on request every worker. `processes` are those
    of the engine; None = unknown, so they are taken to work. `tell` is called when it stops answering (False) and when
    it answers again."""

    def __init__(
        self,
        liveness: Liveness,
        ping: Callable[[bool], Coroutine[Any, Any, None]],
        processes: Observed | None,
        limits: HeartbeatLimits,
        tell: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._liveness = liveness
        self._ping = ping
        self._processes = processes
        self._limits = limits
        self._tell = tell
        self._clock = clock
        self._look_s = limits.timeout_s / _LOOKS_PER_TIMEOUT
        self._silent_s = 0.0
        self._seen: deque[tuple[float, Activity]] = deque()
        self._first: Activity | None = None
        self._is_silent = False
        self._answered_s = clock()

    @property
    def age_s(self) -> float:
        """Seconds since the engine last answered, or since the start."""
        return self._clock() - self._answered_s

    async def run(self) -> None:
        """Returns when the engine is dead, whoever found out."""
        interval_s = min(INTERVAL_S, self._limits.timeout_s / 5)
        workers_asked_s = self._clock()
        while not self._liveness.dead:
            workers = self._clock() >= workers_asked_s + _WORKERS_INTERVAL_S
            if workers:
                workers_asked_s = self._clock()
            pinging = asyncio.create_task(self._ping(workers), name="engine ping")
            try:
                if await self._is_answered(pinging):
                    self._answered()
            except EngineDeadError as error:
                log.error("%s", error)
                return
            finally:
                pinging.cancel()
            with suppress(TimeoutError):  # a death that somebody else has found is told at once
                await asyncio.wait_for(self._liveness.wait_dead(), interval_s)
            self._silent_s += interval_s  # the engine may have stopped right after its answer

    async def _is_answered(self, pinging: "asyncio.Task[None]") -> bool:
        """Whether the answer says that all is well. A stopped process is not noticed unless it is pinged."""
        # A long call has its own deadline, and ends the engine itself if necessary. A call that was made after the ping
        # is not an excuse.
        excuses = self._liveness.occupying
        while not self._liveness.dead:
            began_s = self._clock()
            await asyncio.wait({pinging}, timeout=self._look_s)
            if pinging.done():
                pinging.result()
                if not self._any_stopped():
                    return True
                self._judge()
                return False
            # A stopped process never explains a long call, so this is judged in any case.
            if excuses & self._liveness.occupying and not self._any_stopped():
                self._forget()
                continue
            # Only time in which this loop could have received an answer counts: the daemon itself may have been
            # stopped.
            self._silent_s += min(self._clock() - began_s, 2 * self._look_s)
            self._judge()
        return False

    def _any_stopped(self) -> bool:
        try:
            return self._processes is not None and self._processes.any_stopped()
        except OSError:
            return False

    def _answered(self) -> None:
        if self._is_silent:
            log.warning("the engine answers again, after %.1f s", self._silent_s)
            self._is_silent = False
            self._tell(True)
        self._answered_s = self._clock()
        self._forget()

    def _forget(self) -> None:
        self._silent_s = 0.0
        self._seen.clear()
        self._first = None

    def _judge(self) -> None:
        reason = self._reason()
        if self._silent_s < self._limits.timeout_s:
            return
        if not self._is_silent:
            log.warning("the engine has not answered for %.1f s", self._silent_s)
            self._is_silent = True
            self._tell(False)
        if reason is None and self._silent_s >= self._limits.step_s:
            reason = "no step may take that long"
        if reason is not None:
            log.error("giving up the engine, which has not answered for %.1f s: %s", self._silent_s, reason)
            self._liveness.declare_dead(f"it has not answered for {self._silent_s:.1f} s: {reason}")

    def _reason(self) -> str | None:
        """Why the engine will not answer any more, from the recent activity of its processes; None if it may."""
        window_s = self._limits.timeout_s / 2
        if self._processes is None or self._silent_s < window_s:
            return None
        try:
            now = self._processes.activity()
        except OSError:
            return None
        self._seen.append((self._silent_s, now))
        while len(self._seen) > 1 and self._seen[1][0] <= self._silent_s - window_s:
            self._seen.popleft()
        self._first = self._first or now
        looks = [activity for _, activity in self._seen]
        num_steps, may_idle = now.steps - self._first.steps, self._silent_s < self._limits.idle_s
        return hopeless(looks, self._silent_s - self._seen[0][0], num_steps, may_idle=may_idle)


def hopeless(looks: Sequence[Activity], elapsed_s: float, num_steps: int, *, may_idle: bool = False) -> str | None:
    """Why an engine that does not answer never will; None if a long step may be the cause. `looks` were taken within
    `elapsed_s` seconds, the last one now; `num_steps` have ended since the ping. `may_idle`: it may yet wake up."""
    before, now = looks[0], looks[-1]
    if now.stopped:
        return "one of its processes is stopped"
    if num_steps >= _UNREAD_STEPS:
        return "it continues its steps but does not read calls"
    at_work = sum(look.works for look in looks) >= _IDLE_SHARE * len(looks)
    if not may_idle and not at_work and now.cpu_s - before.cpu_s < _IDLE_SHARE * elapsed_s:
        return "its processes use no CPU"
    return None
