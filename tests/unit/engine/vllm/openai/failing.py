"""A process in the place of an OpenAI server, which fails at once or stays; and a machine that cannot start one."""

import multiprocessing
import os
import resource
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def fail() -> None:
    """Ends with a status that is not 0."""
    sys.exit(3)


def stay() -> None:
    """Answers nothing, and does not end by itself."""
    signal.pause()


class Processes:
    """As genserve.engine.vllm.openai.launch.Launch. `targets`: what the processes do, one after the other; the last
    one for all later ones."""

    flags = Namespace(ssl_certfile=None, ssl_cert_reqs=0)

    def __init__(self, *targets: Any) -> None:
        self._targets = list(targets)
        self.started: list[Any] = []
        self.listener = socket.create_server(("127.0.0.1", 0))

    def start(self, at: Any) -> Any:
        """A process."""
        target = self._targets.pop(0) if len(self._targets) > 1 else self._targets[0]
        process = multiprocessing.get_context("spawn").Process(target=target, daemon=True)
        process.start()
        self.started.append(process)
        return process


@contextmanager
def no_more_files(but: int = 0) -> Iterator[None]:
    """This process cannot open another one, `but` so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + but, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
