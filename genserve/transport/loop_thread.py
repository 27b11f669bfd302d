"""The event loop of a blocking client, in its own thread, and how other threads wait for it.

A thread waits only for what is sure to end: its call, the call's limit, or the loop itself. Nothing takes a lock,
because a finaliser may run on any thread between any two instructions.
"""

import asyncio
import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

from genserve.errors import DeadlineError
from genserve.transport.connection import forked_error
from genserve.transport.errors import ClientClosedError, ClientMisuseError

T = TypeVar("T")

# How long `close` waits for the thread, which only the caller's own code, such as a mapping of weights, can block.
CLOSE_TIMEOUT_S: Final = 5.0
# How long calls that were cancelled before may take to undo what they began, for which they need the connection.
_UNDO_S: Final = 2.5

_running: "weakref.WeakSet[LoopThread]" = weakref.WeakSet()


class Mailbox:
    """Passes a callback's arguments from the loop's thread to the waiting thread, which may skip to the latest."""

    def __init__(self, callback: Callable[..., None]) -> None:
        self._callback = callback
        self._latest: tuple[Any, ...] | None = None
        self._wakeups: SimpleQueue[None] = SimpleQueue()

    def put(self, *args: Any) -> None:
        """The callback for the loop's thread."""
        self._latest = args
        if self._wakeups.empty():
            self._wakeups.put(None)

    def result(self, future: "Future[T]", timeout_s: float | None) -> T:
        """`future.result`, while the callback is called in this thread."""
        future.add_done_callback(lambda _: self._wakeups.put(None))
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            remaining_s = None if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
            with contextlib.suppress(Empty):
                self._wakeups.get(timeout=remaining_s)
            is_done = future.done()
            args, self._latest = self._latest, None
            if args is not None:
                self._callback(*args)
            if is_done or (deadline_s is not None and time.monotonic() >= deadline_s):
                return future.result(timeout=0)


class LoopThread:
    """Runs coroutines for other threads until it is closed, and then `shut_down`."""

    def __init__(self, name: str, shut_down: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._shut_down = shut_down
        self._stopping = asyncio.Event()
        self._closed = False
        self._ended = False
        self._waiting: set[Future[Any]] = set()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        _running.add(self)

    def run(self, coroutine: Coroutine[Any, Any, T], limit_s: float | None = None, mailbox: Mailbox | None = None) -> T:
        """Runs a coroutine and returns its result.

        An exception in this thread, such as KeyboardInterrupt, cancels it. Raises ClientClosedError if the loop is
        closed before or meanwhile; ClientMisuseError in a forked process and on the loop's own thread, where waiting
        would never end; and DeadlineError if the loop does not respond within `limit_s` because code of the caller
        blocks it.
        """
        try:
            self._check()
        except RuntimeError:
            coroutine.close()
            raise
        future: Future[T] = Future()
        tasks: list[asyncio.Task[None]] = []
        self._waiting.add(future)

        try:
            self.post(partial(self._begin, coroutine, future, tasks))
            if self._ended:  # perhaps too late for `_release` to have seen the future
                future.cancel()
            return future.result(limit_s) if mailbox is None else mailbox.result(future, limit_s)
        except CancelledError:
            if not self._closed:
                raise
            if self._ended and not tasks:
                coroutine.close()  # the coroutine never began
            raise self._closed_error() from None
        except TimeoutError:
            if future.done():
                raise  # the error of the call itself
            message = f"the client's event loop did not answer within {limit_s:g} s: code of the caller blocks it"
            raise DeadlineError(message) from None
        finally:
            self._waiting.discard(future)
            if not future.done():
                self.post(lambda: tasks[0].cancel())
            del (
                future
            )  # the traceback of an error refers to this frame: gRPC's call must not wait for the garbage collector

    def _begin(self, coroutine: Coroutine[Any, Any, T], future: "Future[T]", tasks: "list[asyncio.Task[None]]") -> None:
        task = self._loop.create_task(_settle(coroutine, future))
        task.add_done_callback(lambda _: coroutine.close())  # if it was cancelled before it began
        tasks.append(task)

    def post(self, callback: Callable[[], object]) -> bool:
        """Makes the loop call this without waiting: for finalisers. Returns False if the loop has ended."""
        if os.getpid() != self._pid:
            return False
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            return False
        return True

    def stop(self) -> None:
        """Begins to close, without waiting."""
        self._closed = True
        self.post(self._stopping.set)

    def close(self) -> None:
        """Ends the thread; waiting threads get ClientClosedError. Returns at once in a forked process and on the thread
        itself."""
        self.stop()
        if os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT_S)
            self._release()

    def _check(self) -> None:
        if self._closed:
            raise self._closed_error()
        if os.getpid() != self._pid:
            raise forked_error()
        if threading.current_thread() is self._thread:
            raise ClientMisuseError(
                "this was called on the client's own event loop, by code that the client runs there, such as a mapping "
                "of weights or a finaliser: waiting here for another call would never end"
            )

    def _main(self) -> None:
        try:
            self._loop.run_until_complete(self._run_until_stopped())
        finally:
            self._closed = self._ended = True
            self._release()
            self._loop.close()

    async def _run_until_stopped(self) -> None:
        await self._stopping.wait()
        if undoing := {task for task in asyncio.all_tasks() if task.cancelling()}:
            await asyncio.wait(undoing, timeout=_UNDO_S)
        await self._shut_down()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    def _release(self) -> None:
        """Releases every thread that still waits."""
        for future in list(self._waiting):
            future.cancel()

    def _closed_error(self) -> ClientClosedError:
        return ClientClosedError("the client is closed")


async def _settle(coroutine: Coroutine[Any, Any, T], future: "Future[T]") -> None:
    """Sets the outcome of the future, whatever it is: SystemExit too is for the waiting thread, not for the loop."""
    try:
        result = await coroutine
    except asyncio.CancelledError:
        future.cancel()
        raise
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):  # nobody waits any more
            future.set_exception(error)
    else:
        with contextlib.suppress(InvalidStateError):
            future.set_result(result)
    finally:
        del future  # as in `run`


@atexit.register
def _close_all() -> None:
    """Closes all loops before the interpreter freezes their threads, for which nobody could wait then."""
    for thread in list(_running):
        thread.close()
