"""The versions of the weights that sampled an answer over HTTP, in one of its headers."""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any, Final

HEADER: Final = b"genserve-weight-versions"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_known: ContextVar[set[int] | None] = ContextVar("versions of an answer", default=None)


def note(versions: Iterable[int]) -> None:
    """Some of the answer that this is about."""
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
