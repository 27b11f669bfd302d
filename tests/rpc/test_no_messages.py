"""Bytes that are no message, to every method: the fault is the client's, and the daemon's log has nothing to say."""

import gc
import logging

import grpc.aio
import pytest

from genserve.v1 import control_pb2, generation_pb2, weights_pb2
from tests.support.answers import answer_of
from tests.support.patience import turns
from tests.support.scripted_daemon import Daemon, field_of

METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in (generation_pb2, weights_pb2, control_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "GenerateMany"  # ends one request, and not the stream
]


@pytest.mark.parametrize("method", METHODS)
async def test_what_is_no_message_is_the_fault_of_the_client(
    daemon: Daemon, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """INVALID_ARGUMENT, whatever the kind of the method."""
    gc.collect()  # what other tests have left, and asyncio logs then
    await turns()
    caplog.clear()
    make: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = daemon.channel.stream_stream(method)
    call = make(iter([b"\x0a\xff"]), timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await answer_of(call, call.read())
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_of(refused.value) == "frame"
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
