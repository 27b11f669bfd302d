"""Streams that are only held open: how many a role may have, and that none keeps the roles above it away."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from genserve.rpc import reflection, watchers
from genserve.v1 import control_pb2
from genserve.v1.control_pb2_grpc import ControlServiceStub
from tests.rpc.guarded import Guarded, guarded
from tests.support.answers import answer_of
from tests.support.patience import STEP_S
from tests.support.scripted_daemon import reason_of


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded(tmp_path) as running:
        yield running


def metadata_of(served: Guarded, name: str) -> tuple[tuple[str, str], ...]:
    """Of a caller; nothing of one without a name."""
    return (("authorization", f"Bearer {served.callers.tokens[name]}"),) if name else ()


def call_of(served: Guarded, watched: str, name: str) -> Any:
    """A stream that somebody opens."""
    channel, metadata = served.daemon.channel, metadata_of(served, name)
    if watched == "status":
        return ControlServiceStub(channel).WatchStatus(control_pb2.WatchStatusRequest(), metadata=metadata)
    if watched == "health":
        return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), metadata=metadata)
    return reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(metadata=metadata)


@contextmanager
def held(calls: list[Any]) -> Iterator[None]:
    """Streams end with the block."""
    try:
        yield
    finally:
        for call in calls:
            call.cancel()


async def begin(call: Any, watched: str) -> None:
    """Returns when it is served. Raises what it is refused with."""
    async with asyncio.timeout(STEP_S):
        if watched == "reflection":
            await answer_of(call, call.write(reflection_pb2.ServerReflectionRequest(list_services="*")))
        assert await call.read() is not grpc.aio.EOF


LIMITS = {
    ("status", "generate"): watchers.MAX_WATCHERS,
    ("health", ""): watchers.MAX_WATCHERS // 2,
    ("reflection", ""): reflection.MAX_STREAMS // 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(("watched", "name"), LIMITS)
async def test_streams_of_one_role_leave_room_for_those_above_it(served: Guarded, watched: str, name: str) -> None:
    """Whoever has used up the room of its role is told so, and how to do without; there is room again when one ends."""
    calls: list[Any] = []
    with held(calls):
        for _ in range(LIMITS[watched, name]):
            calls.append(call_of(served, watched, name))
            await begin(calls[-1], watched)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await begin(call_of(served, watched, name), watched)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(refused.value) == "QUEUE_FULL"
        assert f"role {name}" in str(refused.value.details()) or not name
        for above in ("trainer", "operator", "router"):
            calls.append(call_of(served, watched, above))
            await begin(calls[-1], watched)
        calls[0].cancel()
        async with asyncio.timeout(STEP_S):
            while True:
                calls.append(call_of(served, watched, name))
                try:
                    await begin(calls[-1], watched)
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)
