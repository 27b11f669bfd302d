"""An event loop whose time passes only where nothing else is to be done, and programs that run in it.

Everything runs in one thread, and what "a thread" does is done at once. So what happens in which order follows from the
timers alone, and these from whoever draws the delays.
"""

import asyncio
import contextvars
import itertools
import random
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

BEGAN_S = 1_750_000_000.0
"""Unix time at which each simulation begins."""


_TURN_S = 1e-9
"""Timers of so little time are over at once: without it whoever waits for the rest of one would never get there."""


class StandstillError(RuntimeError):
    """Nothing is ready, and no timer is left: what is awaited will never happen."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Leaps to the next timer when nothing is ready. It has no sockets and no threads."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self.results: list[Any] = []
        """Of what "threads" did that has to be closed."""
        self.next_number = itertools.count().__next__
        self._selector = self  # what BaseEventLoop asks for events
        self.set_task_factory(_adopted_task)

    def time(self) -> float:
        return self._now_s

    def select(self, timeout_s: float | None) -> tuple[()]:
        """Lets time pass, instead of waiting for sockets."""
        if timeout_s is None:
            raise StandstillError("nothing is ready, and no timer is left")
        self._now_s += max(_TURN_S, timeout_s)
        return ()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        """Calls it at once; its result is told in a later turn, as that of a thread is."""
        done = self.create_future()
        try:
            result = func(*args)
        except Exception as error:
            self.call_soon(_unless_done, done.set_exception, done, error)
        else:
            if hasattr(result, "close"):
                self.results.append(result)
            self.call_soon(_unless_done, done.set_result, done, result)
        return done

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody waits in another thread."""


def _unless_done(tell: Callable[[Any], None], future: "asyncio.Future[Any]", told: Any) -> None:
    if not future.done():
        tell(told)


PROCESS: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("PROCESS", default=None)
"""Which program the running code belongs to."""


@dataclass
class WallClock:
    """Of a host. `ahead_s`: of the true time."""

    ahead_s: float = 0.0


class Process:
    """A run of a program on `host`, which ends at once when it is killed. `clock`: of its host; None = a right one."""

    def __init__(self, host: str, clock: WallClock | None = None) -> None:
        self.host = host
        self.clock = clock or WallClock()
        self.is_alive = True
        self._tasks: dict[asyncio.Task[Any], None] = {}  # in order
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def start(self, work: Coroutine[Any, Any, Any], name: str = "") -> "asyncio.Task[Any]":
        """Runs it as a part of this program, and of none that has called this."""
        return asyncio.get_running_loop().create_task(work, name=name, context=self.context.copy())

    def adopt(self, task: "asyncio.Task[Any]") -> None:
        """A task that ends with the program."""
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def kill(self) -> None:
        """Nothing that it does from now on has an effect: what its tasks do to end themselves reaches nobody."""
        self.is_alive = False
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks) if tasks else None


class _NumberedTask(asyncio.Task[Any]):
    """Has its place in a set by when it was made: `asyncio.wait` tells of sets, whose order would be that of
    addresses in memory."""

    def __init__(self, work: Coroutine[Any, Any, Any], *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        assert isinstance(loop, VirtualLoop)
        self._number = loop.next_number()
        super().__init__(work, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


def _adopted_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
) -> "asyncio.Task[Any]":
    task = _NumberedTask(work, loop=loop, **options)
    context = options.get("context")
    process = PROCESS.get() if context is None else context.get(PROCESS)
    if process is not None:
        process.adopt(task)
    return task


@contextmanager
def virtual_time(seed: int) -> Iterator[VirtualLoop]:
    """A loop, and its time as what the module `time` says; ids and choices at random follow from the seed."""
    loop = VirtualLoop()
    drawn = random.Random(seed)
    real = time.monotonic, time.time, time.perf_counter, uuid.uuid4
    state = random.getstate()

    def wall_clock() -> float:
        process = PROCESS.get()
        return BEGAN_S + loop.time() + (0.0 if process is None else process.clock.ahead_s)

    time.monotonic = time.perf_counter = loop.time
    time.time = wall_clock
    uuid.uuid4 = lambda: uuid.UUID(int=drawn.getrandbits(128), version=4)
    random.seed(seed)
    try:
        yield loop
    finally:
        time.monotonic, time.time, time.perf_counter, uuid.uuid4 = real
        random.setstate(state)
        loop.close()
