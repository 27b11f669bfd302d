"""A daemon for each test."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TypeAlias

import pytest

from genserve.client import AsyncClient
from genserve.engine.types import Load
from genserve.settings.config import ServeConfig
from tests.support import pulled_peers as peers
from tests.support.scripted_daemon import MAX_MESSAGE_BYTES, Daemon, serving

Start: TypeAlias = "Callable[[], Awaitable[tuple[Daemon, AsyncClient]]]"


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    async with serving(ServeConfig(port=0, max_message_bytes=MAX_MESSAGE_BYTES)) as running:
        yield running


def busier(load: Load, running: int) -> Load:
    """The load with another number of running sequences."""
    return replace(load, running=running)


@pytest.fixture
async def daemons() -> AsyncIterator[Start]:
    """Starts daemons for the weights of `peers`, each with a client of it."""
    async with AsyncExitStack() as stack:

        async def start() -> tuple[Daemon, AsyncClient]:
            config = ServeConfig(port=0, no_shared_memory=True)
            running = serving(config, checkpoint=peers.CHECKPOINT, max_staging_bytes=100 * peers.MIB)
            daemon = await stack.enter_async_context(running)
            return daemon, await stack.enter_async_context(AsyncClient(daemon.address))

        yield start
