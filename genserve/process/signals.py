"""The ways to stop a process: signals while the engine starts and while the daemon runs, or a call; and how one has
ended.

A terminal sends Ctrl-C to the whole process group. The engine's processes must not get it, because they would end
before the daemon has drained. They inherit the signal mask of the thread that starts them, so SIGINT is blocked there.
"""

import asyncio
import ctypes
import math
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from genserve.observe.notices import say

T = TypeVar("T")

_REPEATS_S = 1.0
"""For so long further SIGTERMs repeat the first: the kernel had sent them before it was told to send no more."""
_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2


@contextmanager
def children_ignore_interrupts() -> Iterator[None]:
    """Processes that this thread starts in this context never receive SIGINT. Other threads do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def stop_on_signals(stop: Callable[[str], None], at_once: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `stop` with its name; a second one exits now, after `at_once`. After the block
    the process ends by itself, and a first signal changes nothing."""
    loop = asyncio.get_running_loop()
    seen, is_over = False, False
    repeats_until_s = -math.inf

    def on_signal(number: signal.Signals) -> None:
        nonlocal seen, repeats_until_s
        if number == signal.SIGTERM and time.monotonic() < repeats_until_s:
            return
        if seen:
            say(f"second {number.name}, exiting now")
            at_once()
            os._exit(128 + number)
        seen = True
        if number == signal.SIGTERM and _forget_starter():
            repeats_until_s = time.monotonic() + _REPEATS_S
        if not is_over:
            stop(number.name)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        is_over = True
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, lambda received, _: on_signal(signal.Signals(received)))


class Stopped(asyncio.Event):
    """Set by the first signal or call that ends the process. `cause` is its name, and `drain_timeout_s` the time for
    what runs, None = as the flags say."""

    cause = ""
    drain_timeout_s: float | None = None

    def __init__(self) -> None:
        super().__init__()
        self._signalled = asyncio.Event()

    def stop(self, cause: str, drain_timeout_s: float | None = None) -> None:
        """Later causes change nothing. It does not print that the process drains: one that has failed meanwhile does
        not."""
        if not self.is_set():
            self.cause, self.drain_timeout_s = cause, drain_timeout_s
            self.set()

    def signal(self, name: str) -> None:
        """As `stop`, and after a call it leaves what runs no more time than the flags say: whoever sends it will not
        wait longer."""
        self.stop(name)
        self._signalled.set()

    def limit_s(self, flag_s: float) -> float:
        """The time for what runs; `flag_s` if the cause says none."""
        return flag_s if self.drain_timeout_s is None else self.drain_timeout_s

    async def wait_ended(self, ending: "asyncio.Future[Any]", flag_s: float) -> bool:
        """Waits until `ending` is done or the time is over, and returns whether it is done; cancels nothing. A signal
        that comes meanwhile leaves `flag_s` at most."""
        limit_s, was_signalled = self.limit_s(flag_s), self._signalled.is_set()
        until_s = time.monotonic() + limit_s
        signalled = asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait({ending, signalled}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            signalled.cancel()
        if self._signalled.is_set() and not ending.done():
            left_s = min(max(0.0, until_s - time.monotonic()), flag_s)
            if not was_signalled:
                say(f"a signal: {left_s:g} s at most from now; a second one exits at once")
            await asyncio.wait({ending}, timeout=left_s)
        return ending.done()


@contextmanager
def stopped_by_signal() -> Iterator[Stopped]:
    """Set by the first signal; a second one exits at once."""
    stopped = Stopped()
    with stop_on_signals(stopped.signal):
        yield stopped


async def unless_stopped(starting: Awaitable[T], stopped: Stopped) -> T:
    """What a start returns or raises. A signal meanwhile ends this process at once: a thread that starts an engine
    cannot be cancelled, and the engine's processes end when this one does."""
    start, waiting = asyncio.ensure_future(starting), asyncio.create_task(stopped.wait())
    await asyncio.wait({start, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not start.done():
        say(f"{stopped.cause} while starting, exiting now")
        os._exit(128 + signal.Signals[stopped.cause])
    return start.result()


def _forget_starter() -> bool:
    """From here on the kernel sends nothing when the starter of this process ends. Returns whether it would have: it
    sends SIGTERM for each thread of a starter that is killed, and these end one after the other."""
    prctl = ctypes.CDLL(None).prctl
    armed = ctypes.c_int()
    prctl(_PR_GET_PDEATHSIG, ctypes.byref(armed), 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    return armed.value != 0


def ending(status: int) -> str:
    """How a process ended, for people; `status` as subprocess has it."""
    if status >= 0:
        return f"ended with status {status}"
    # Most real-time signals have no name.
    return f"was ended by {next((each.name for each in signal.Signals if each == -status), f'signal {-status}')}"
