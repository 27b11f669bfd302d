"""What is read of a request over HTTP."""

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from genserve.engine.vllm.openai.bodies import BoundedBodies
from tests.support.clocks import advanced_clock

LIMIT = 100


async def answered(*parts: bytes, declared: int | None = None, ends: bool = True) -> int:
    """The status of the answer to a request whose body comes in these parts."""

    async def read(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if declared is None else [(b"content-length", str(declared).encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": headers}
    await BoundedBodies(Starlette(routes=[Route("/", read, methods=["POST"])]), LIMIT)(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("parts", "declared", "status"),
    [
        ([b"x" * LIMIT], LIMIT, 200),
        ([b"x" * 60, b"x" * 40], None, 200),
        ([], LIMIT + 1, 413),
        ([b"x" * 60, b"x" * 41], None, 413),
        ([], None, 200),
    ],
)
async def test_a_body_may_have_so_many_bytes(parts: list[bytes], declared: int | None, status: int) -> None:
    """However it comes; what its headers say is enough to refuse it unread."""
    assert await answered(*parts, declared=declared) == status


async def test_the_next_part_of_a_body_is_not_waited_for_for_long() -> None:
    """Half a request would hold up a shutdown."""
    with advanced_clock() as clock:
        asking = asyncio.create_task(answered(b"x", ends=False))
        await clock.advance(9)
        assert not asking.done()
        await clock.advance(2)
        assert await asking == 408
