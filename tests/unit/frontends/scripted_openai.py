"""A process in the place of an OpenAI server, which fails at once, stays or answers; and a machine that cannot start
one."""

import asyncio
import multiprocessing
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from genserve.daemon.openai_process import Inherited
from genserve.frontends.questions import FrontendSettings
from genserve.frontends.template import Started
from genserve.process.signals import ending
from tests.unit.frontends import scripted_frontend


def fail(link: Inherited) -> None:
    """Ends with a status that is not 0."""
    sys.exit(3)


def stay(link: Inherited) -> None:
    """Answers nothing, and does not end by itself."""
    signal.pause()


def answer(link: Inherited) -> None:
    """Does what the invitation says."""
    asyncio.run(scripted_frontend.serve(FrontendSettings(0, link.fd, -1, (), 7)))


class Processes:
    """As genserve.daemon.openai_process.Launch, with a listener. `targets`: what the processes do, one after the other;
    the last one for all later ones."""

    def __init__(self, *targets: Any) -> None:
        self._targets = list(targets)
        self.started: list[Any] = []
        self.listener = socket.create_server(("127.0.0.1", 0))

    async def start(self, settings: FrontendSettings) -> Started:
        """A process."""
        target = self._targets.pop(0) if len(self._targets) > 1 else self._targets[0]
        link = Inherited(settings.link_fd)
        process: Any = multiprocessing.get_context("spawn").Process(target=target, args=(link,), daemon=True)
        process.start()
        self.started.append(process)
        return Started(process.pid, os.pidfd_open(process.pid))

    async def how_ended(self, pid: int) -> str:
        """For people."""
        self.started[-1].join()
        return ending(self.started[-1].exitcode)


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process cannot open another one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
