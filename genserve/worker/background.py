"""The thread that does a worker's work beside the live model: it prepares versions, and frees them."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

log = logging.getLogger(__name__)


class Background:
    """One thread, which does one piece of work after the other.

    It is always the same thread, because glibc gives each thread memory of its own: what one push has freed, the next
    one uses, and the kernel need not clear those pages again. That was half of the CPU time of a preparation.

    It has the priority of the live model's thread, as it needs the same CPU time at any priority: a lower one makes a
    push three times as long, and a thread that waits for a CPU may hold Python's lock.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        """`cpus`: the logical CPUs that it may use. vLLM binds the thread that calls to a few of them."""
        self._cpus = cpus
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="genserve-weights", daemon=True).start()

    def do(self, work: Callable[[], None]) -> None:
        """Does this after what was asked for before. What it raises is only logged."""
        self._work.put(work)

    def do_within(
        self,
        timeout_s: float,
        work: Callable[[], None],
        late: Callable[[], None],
        *,
        may_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        """As `do`. If its turn has not come after `timeout_s` seconds, `late` is called instead, by another thread; or
        after as many seconds again, as long as it `may_wait`."""
        taken = threading.Lock()

        def give_up() -> None:
            if may_wait() and not taken.locked():
                start_timer()
            elif taken.acquire(blocking=False):
                late()

        def start_timer() -> None:
            timer = threading.Timer(timeout_s, give_up)
            timer.daemon = True
            timers[:] = [timer]
            timer.start()

        def begin() -> None:
            if taken.acquire(blocking=False):
                timers[0].cancel()
                work()

        timers: list[threading.Timer] = []
        start_timer()
        self.do(begin)

    def wait(self, timeout_s: float) -> bool:
        """Waits until all is done that was asked for; whether it was in time."""
        done = threading.Event()
        self.do(done.set)
        return done.wait(timeout_s)

    def _run(self) -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, self._cpus)
        while True:
            work = self._work.get()
            try:
                work()
            except Exception:
                log.exception("work beside the live model failed")
            del work  # with the version that it holds
