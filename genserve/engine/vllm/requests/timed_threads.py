"""A few threads for work of unpredictable length: work that takes too long is ended if possible, and abandoned if not.

The work must import nothing: an import that is interrupted may leave its lock taken.
"""

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class _TimeIsUp(BaseException):
    """Raised inside the thread. It is not an Exception, so that the work does not catch it."""


class _Job:
    """One piece of work. Its lock ensures that a thread is interrupted in this work and not in the next one."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self._action: Callable[[], Any] | None = action

    def run(self) -> Any:
        with self._lock:
            if (action := self._action) is None:
                raise _TimeIsUp
            self._thread_id = threading.get_ident()
        try:
            return action()
        finally:
            with self._lock:
                self._thread_id = None

    def give_up(self) -> None:
        with self._lock:
            self._action = None  # it may be large, and wait in the queue for long
            if self._thread_id is not None:
                # CPython raises it at the thread's next bytecode. A single long call into C is not interrupted, and
                # keeps its thread: the others continue, and callers that find no thread in time get an error.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread_id), ctypes.py_object(_TimeIsUp))


class TimedThreads:
    """`limit_s`: seconds that a caller waits at most, for the queue and the work together."""

    def __init__(self, name: str, num_threads: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=f"genserve-{name}")

    async def run(self, action: Callable[[], T]) -> T:
        """The result of `action`, called in a thread. Raises TimeoutError."""
        job = _Job(action)
        running: asyncio.Future[T] = asyncio.get_running_loop().run_in_executor(self._executor, job.run)
        try:
            async with asyncio.timeout(self.limit_s):
                return await asyncio.shield(running)
        except BaseException:
            # Also if the caller is cancelled: nobody waits for the result any more.
            running.add_done_callback(_ignore)
            job.give_up()
            raise

    def close(self) -> None:
        """Accepts no more work."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _ignore(done: "asyncio.Future[Any]") -> None:
    """Retrieves the result, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()
