"""Messages of clients, which arrive as bytes."""

import pytest

from genserve.errors import InvalidFieldError
from genserve.fleet.services import callers
from genserve.fleet.services.callers import parsed
from genserve.v1 import generation_pb2
from tests.support.refusals import refuses

Request = generation_pb2.GenerateRequest


async def test_large_messages_are_parsed_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones on it; bytes that are none are refused either way."""
    threads: list[object] = []

    async def to_thread(read: object) -> object:
        threads.append(read)
        return read()  # type: ignore[operator]

    monkeypatch.setattr(callers.asyncio, "to_thread", to_thread)
    small, large = Request(text="x").SerializeToString(), Request(text="x" * 100_000).SerializeToString()
    assert await parsed(Request, small, lambda message: message.text) == "x" and not threads
    assert len(await parsed(Request, large, lambda message: message.text)) == 100_000 and len(threads) == 1
    for data in (b"\xff", b"\xff" * 100_000):
        with refuses(InvalidFieldError, field="frame"):
            await parsed(Request, data, lambda message: message)
