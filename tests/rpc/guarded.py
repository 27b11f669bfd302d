"""A daemon whose callers are listed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from genserve.client import AsyncClient
from genserve.settings.config import ServeConfig
from tests.support.credentials import Callers, one_each
from tests.support.scripted_daemon import Daemon, serving


@dataclass
class Guarded:
    """A daemon with a caller for each role."""

    daemon: Daemon
    callers: Callers

    def client(self, name: str) -> AsyncClient:
        return AsyncClient(self.daemon.address, token=self.callers.tokens[name])


@asynccontextmanager
async def guarded(directory: Path, **settings: Any) -> AsyncIterator[Guarded]:
    callers = one_each(directory)
    async with serving(ServeConfig(port=0, auth_file=callers.auth_file, **settings)) as daemon:
        yield Guarded(daemon, callers)
