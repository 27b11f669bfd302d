"""A daemon for each test."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from genserve.config import ServeConfig
from genserve.engine.types import Load
from tests.support.scripted_daemon import MAX_MESSAGE_BYTES, Daemon, serving


@pytest.fixture
async def daemon() -> AsyncIterator[Daemon]:
    async with serving(ServeConfig(port=0, max_message_bytes=MAX_MESSAGE_BYTES)) as running:
        yield running


def busier(load: Load, running: int) -> Load:
    """The load with another number of running sequences."""
    return replace(load, running=running)
