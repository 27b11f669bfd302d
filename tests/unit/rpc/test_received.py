"""When a request of GenerationService is parsed, where, and whether at all."""

import sys
import threading

import pytest
from google.protobuf.message import DecodeError

from genserve.errors import MessageTooLargeError
from genserve.rpc.received import Received, receiver
from genserve.v1 import generation_pb2
from tests.support.refusals import refuses

LIMIT_BYTES = 100_000
SMALL_BYTES = 32 << 10
"""What is parsed on the event loop: that takes less time than to pass it to a thread."""


def message(size_bytes: int) -> bytes:
    """A request that is as long as that."""
    text = size_bytes
    while len(data := generation_pb2.GenerateRequest(text="x" * text).SerializeToString()) > size_bytes:
        text -= 1
    assert len(data) == size_bytes
    return data


def received(data: bytes) -> Received[generation_pb2.GenerateRequest]:
    """As a server makes it."""
    made: Received[generation_pb2.GenerateRequest] = receiver(generation_pb2.GenerateRequest, LIMIT_BYTES)(data)
    return made


@pytest.mark.parametrize(
    ("size_bytes", "on_the_loop"),
    [(10, True), (SMALL_BYTES, True), (SMALL_BYTES + 1, False), (LIMIT_BYTES, False)],
)
async def test_a_small_message_is_parsed_at_once_and_a_large_one_in_a_thread(
    size_bytes: int, on_the_loop: bool
) -> None:
    """Together with what is made of it: every stream of tokens would wait for both."""
    data = message(size_bytes)

    def convert(request: generation_pb2.GenerateRequest) -> tuple[bytes, bool]:
        return request.SerializeToString(), threading.current_thread() is threading.main_thread()

    assert await received(data).read(convert) == (data, on_the_loop)


async def test_a_message_that_is_too_long_is_neither_parsed_nor_kept() -> None:
    """Its beginning is, which may say whose it is."""
    data = message(LIMIT_BYTES + 1)
    before = sys.getrefcount(data)
    made = received(data)
    with refuses(MessageTooLargeError, says=str(LIMIT_BYTES + 1)):
        await made.read(lambda request: pytest.fail("it was parsed"))
    assert sys.getrefcount(data) == before
    assert made.head == data[:2048]


async def test_what_is_no_message_is_an_error_when_it_is_read() -> None:
    """Not when it arrives, where nobody could answer."""
    with pytest.raises(DecodeError):
        await received(b"\xff\xff").read(lambda request: request)
