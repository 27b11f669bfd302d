"""ASGI applications around vLLM's: a header with the versions of the weights that sampled an answer, and limits of a
request's body, in size and in the time that its next part takes."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Final

from starlette.exceptions import HTTPException

from genserve.aio import silence

HEADER: Final = b"genserve-weight-versions"

MAX_MEDIA_BYTES: Final = 256 << 20
"""Of a request for a model that takes images or audio, which are in it."""

_PART_S: Final = 10.0

_PART_BYTES: Final = 64 << 10
"""Of a part, unless it is the last one: a body that came byte by byte would not end."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
_known: ContextVar[set[int] | None] = ContextVar("versions of an answer", default=None)


def note(versions: Iterable[int]) -> None:
    """Adds versions to those of the answer that is being made, for `VersionsHeader`."""
    known = _known.get()
    if known is not None:
        known.update(versions)


class VersionsHeader:
    """An ASGI application that gives the answers of `app` the header, if versions are known when an answer begins: the
    headers of one that is streamed are sent before. Errors have none: nothing of what was sampled is answered."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        known: set[int] = set()

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == HTTPStatus.OK and known:
                message["headers"] = [
                    *message.get("headers", ()),
                    (HEADER, ", ".join(map(str, sorted(known))).encode()),
                ]
            await send(message)

        _known.set(known)
        await self._app(scope, receive, send_with_header)


class BoundedBodies:
    """An ASGI application that reads at most `max_bytes` of a request's body for `app`, and waits for no part of it
    longer than a few seconds: parsing a large one holds up all answers, and half of one a shutdown."""

    def __init__(self, app: App, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        num_declared, num_bytes, is_whole = int(declared) if declared.isdigit() else 0, 0, False

        async def bounded() -> Message:
            """Raises HTTPException, of which vLLM's application makes an answer."""
            nonlocal num_bytes, is_whole
            if is_whole:  # what still comes is the end of the connection
                return await receive()
            self._check(num_declared)
            try:
                async with silence(_PART_S):
                    message = await _part(receive)
            except TimeoutError:
                raise HTTPException(
                    HTTPStatus.REQUEST_TIMEOUT,
                    f"neither {_PART_BYTES} bytes more of the request nor its end came within {_PART_S:g} s",
                ) from None
            num_bytes += len(message.get("body", b""))
            self._check(num_bytes)
            is_whole = not message.get("more_body", False)
            return message

        await self._app(scope, bounded, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise HTTPException(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request must have at most {self._max_bytes} bytes"
            )


async def _part(receive: Receive) -> Message:
    """The next messages of a body as one, or what ends the connection."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if len(body) >= _PART_BYTES or not message.get("more_body", False):
            return {**message, "body": bytes(body)}
    return message
