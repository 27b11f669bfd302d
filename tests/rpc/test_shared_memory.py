"""The client's side of shared memory: where it hands some over, and where it sends bytes."""

import gc

import pytest

from genserve.client import AsyncClient
from genserve.errors import InvalidFieldError, UnsupportedError
from genserve.settings.config import ServeConfig
from tests.rpc.frames import DATA, END, header, refused
from tests.rpc.segments import WEIGHTS, memory, segment
from tests.support import memory_files
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon, field_of, serving


def num_segments() -> int:
    """Memories that are handed over in this process, where the daemon runs too."""
    return len(memory_files.open_files("genserve-push"))


async def test_the_client_hands_memory_over_where_it_can(daemon: Daemon) -> None:
    """Asked to, no byte of the weights goes over the connection."""
    before = num_segments()  # clients of other tests may keep some
    async with AsyncClient(daemon.address) as client:
        for version in (1, 2):
            result = await client.push_weights(WEIGHTS, version=version, shared_memory=True)
            assert result.applied is not None
            assert daemon.engine.live == {"a": DATA[:16], "b": DATA[16:]}
        assert num_segments() == before + 1, "it is kept for the next push"
    assert num_segments() == before


async def test_a_client_that_is_dropped_keeps_no_memory(daemon: Daemon) -> None:
    """Nobody closed it."""
    before = num_segments()
    client = AsyncClient(daemon.address)
    await client.push_weights(WEIGHTS, version=1, shared_memory=True)
    assert num_segments() == before + 1
    del client
    gc.collect()
    assert num_segments() == before


async def test_the_client_sends_bytes_where_memory_cannot_be_had(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon says that it could, and then cannot: bytes, unless memory was asked for."""
    monkeypatch.setattr("genserve.client.weights.calls.MIN_BYTES", 0)
    monkeypatch.setattr("genserve.memory.ring.NAME_PREFIX", "of another name")
    async with AsyncClient(daemon.address) as client:
        with refuses(InvalidFieldError, field="segment.path"):
            await client.push_weights(WEIGHTS, version=1, shared_memory=True)
        assert (await client.push_weights(WEIGHTS, version=1)).applied is not None


async def test_a_daemon_may_take_bytes_alone() -> None:
    """--no-shared-memory."""
    async with serving(ServeConfig(port=0, no_shared_memory=True)) as daemon, AsyncClient(daemon.address) as client:
        with pytest.raises(UnsupportedError):
            await client.push_weights(WEIGHTS, version=1, shared_memory=True)
        with memory() as (path, _):
            error = await refused(daemon, [await header(daemon), segment(path), END])
        assert field_of(error) == "segment"
        assert (await client.push_weights(WEIGHTS, version=1)).applied is not None
