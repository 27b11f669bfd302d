"""What is read of a request over HTTP, and the header that names the versions of its answer."""

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from genserve.engine.vllm.openai.asgi import HEADER, BoundedBodies, Message, Receive, Send, VersionsHeader, note
from tests.support.clocks import advanced_clock
from tests.support.patience import slow

LIMIT = 100


async def answered(*parts: bytes, declared: int | None = None, ends: bool = True, every_s: float = 0.0) -> int:
    """The status of the answer to a request whose body comes in these parts, one every so many seconds."""

    async def read(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if ends:
        messages.append({"type": "http.request", "body": b"", "more_body": False})
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        await slow(every_s)
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
        await clock.advance_until(asking.done, 2)
        assert await asking == 408


async def test_a_body_does_not_come_byte_by_byte() -> None:
    """It would hold up a shutdown, and what came before, for as long as its client likes."""
    with advanced_clock() as clock:
        asking = asyncio.create_task(answered(*[b"x"] * 50, every_s=9))
        await clock.advance_until(asking.done, 1)
        assert await asking == 408


async def test_a_server_that_stood_still_blames_no_request() -> None:
    """What it waits for came meanwhile."""
    with advanced_clock() as clock:
        asking = asyncio.create_task(answered(b"x", every_s=5))
        for _ in range(2):
            await clock.advance(100)
        await clock.advance_until(asking.done, 1)
        assert await asking == 200


@pytest.mark.parametrize(("status", "told"), [(200, [(HEADER, b"7, 8")]), (500, []), (400, [])])
async def test_an_error_names_no_versions_although_tokens_were_sampled(status: int, told: list[object]) -> None:
    """Nothing of what they sampled is answered."""
    sent: list[Message] = []

    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        note([7, 8, 7])
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message)

    await VersionsHeader(app)({"type": "http"}, receive, send)
    assert [each["headers"] for each in sent] == [told]


async def test_versions_are_in_order_if_the_sequence_that_began_last_ends_first() -> None:
    """One of n sequences may wait for its turn until after a push, and end before one that began before it."""
    sent: list[Message] = []

    async def app(_scope: Message, _receive: Receive, send: Send) -> None:
        note([8])
        note([7, 8])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        sent.append(message)

    await VersionsHeader(app)({"type": "http"}, receive, send)
    assert sent[0]["headers"] == [(HEADER, b"7, 8")]
