"""How far the engine's start has come, by what vLLM's processes log.

vLLM's handshake tells only that a process is connected and that it is ready. Its log lines tell what it does in
between, in every executor. So during a start vLLM's logging configuration has an additional handler, which sends the
step that a line begins to a socket of the daemon. A lost datagram loses a step of the display, and nothing else.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from genserve.process.leftovers import prefix

STEPS = (
    "reading the model's configuration",
    "starting the engine's processes",
    "starting the workers",
    "loading weights",
    "measuring memory",
    "compiling",
    "capturing graphs and warming up",
    "preparing the workers for pushes",
    "taking a first step",
    "starting to serve",
)
"""In their order. Ranks are not at the same step at the same time: the one that is furthest counts."""
CONFIGURATION, PROCESSES, WORKERS, WEIGHTS, MEMORY, COMPILATION, GRAPHS, ATTACHING, STEP, SERVING = range(len(STEPS))
# internal: the beginnings of log lines of vLLM 0.32, before their arguments are filled in. tests/engine/
# test_start_progress.py fails if one of them is not in vLLM's sources any more, or if a start does not log them.
LINES = {
    "Initializing a V1 LLM engine": WORKERS,
    "Starting to load model": WEIGHTS,
    "Loading model from scratch": WEIGHTS,  # the second model runner
    "Model loading took": MEMORY,
    "%sUsing cache directory: %s for vLLM's torch.compile": COMPILATION,
    "%s KV cache size: ": GRAPHS,
    "Warming up model for the compilation": GRAPHS,  # on a CPU
}
"""The step that begins with a line."""
_MAX_BYTES = 16


class ProgressHandler(logging.Handler):
    """Sends the number of the step that a line begins to the socket at `path`."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.INFO)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Does nothing when nobody listens any more."""
        line = str(record.msg)
        step = next((step for begins, step in LINES.items() if line.startswith(begins)), None)
        if step is None:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(str(step).encode(), self._path)


class Progress:
    """The steps of one start, made on the event loop. `tell` gets each step when it begins, unless a later one has
    begun already."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._step = -1
        self.path = ""
        """Where handlers send steps; "" when nobody listens."""

    def reach(self, step: int) -> None:
        """A step of STEPS has begun. Call on the event loop."""
        if step > self._step:
            self._step = step
            self._tell(STEPS[step])

    def reach_soon(self, step: int) -> None:
        """The same, from a thread."""
        self._loop.call_soon_threadsafe(self.reach, step)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Takes what handlers send. Enter on the event loop."""
        loop = self._loop
        with (
            TemporaryDirectory(prefix=prefix("start")) as directory,
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver,
        ):
            receiver.setblocking(False)
            self.path = str(Path(directory, "progress"))
            receiver.bind(self.path)
            loop.add_reader(receiver.fileno(), self._receive, receiver)
            try:
                yield
            finally:
                loop.remove_reader(receiver.fileno())
                self.path = ""

    def _receive(self, receiver: socket.socket) -> None:
        with suppress(BlockingIOError):
            told = receiver.recv(_MAX_BYTES)
            if told.isdigit() and int(told) < len(STEPS):
                self.reach(int(told))
