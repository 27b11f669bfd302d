"""Messages between the daemon and one front end, over a socket that only the two have.

Either side asks the other one, and waits for the answer until a deadline. A frame has two lengths of four bytes, a
JSON object and bytes.
"""

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from genserve.errors import (
    DeadlineError,
    GenserveError,
    MessageTooLargeError,
    QueueFullError,
    UnavailableError,
    error_for_reason,
)

MAX_JSON_BYTES = 64 << 20
_MAX_BYTES = 256 << 20
MAX_HANDLED = 4096
"""Questions of the other side that are being answered: far more than it asks for clients at a time, and for itself."""
MAX_FOR_CLIENTS = 1024
"""Questions for clients without an answer. One that nobody waits for any more counts until it is answered: the other
side still works on it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """A question or an answer: values that JSON can hold, and bytes."""

    values: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""


Handler = Callable[[Message], Awaitable[Message]]


class Link:
    """One end. `handlers` answer the questions of the other end, by their names. A handler's GenserveError is raised
    where it was asked."""

    def __init__(self, end: socket.socket, handlers: Mapping[str, Handler]) -> None:
        self._end = end
        self._handlers = handlers
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._for_clients: set[int] = set()
        self._may_ask = asyncio.Semaphore(MAX_FOR_CLIENTS)
        self._handling: set[asyncio.Task[None]] = set()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def open(self) -> None:
        """Call first. Questions can be asked then; answers come while `run` runs."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._end)

    async def run(self) -> None:
        """Reads until the other end is closed. Every question that waits then raises UnavailableError."""
        assert self._reader is not None
        try:
            while (frame := await _read(self._reader)) is not None:
                head, data = frame
                if "question" in head:
                    self._handle(head, data)
                else:
                    self._take_answer(head, data)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # it was killed
        finally:
            self.close()

    async def ask(self, question: str, message: Message = Message(), *, timeout_s: float) -> Message:
        """The answer of the other end. Raises its GenserveError, DeadlineError, or UnavailableError if it ends."""
        return await self._answer_to(next(self._numbers), question, message, timeout_s)

    async def ask_for_client(self, question: str, message: Message, *, timeout_s: float) -> Message:
        """Like `ask`, for a client, of which there may be any number: waits while too many have no answer yet, and
        raises QueueFullError if this takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._may_ask.acquire()
        except TimeoutError:
            raise QueueFullError(
                f"{MAX_FOR_CLIENTS} calls wait for the answer of another process", retry_after_s=1.0
            ) from None
        number = next(self._numbers)
        self._for_clients.add(number)
        try:
            return await self._answer_to(number, question, message, timeout_s)
        finally:
            if number not in self._waiting:
                self._end_for_client(number)  # it was never sent

    async def _answer_to(self, number: int, question: str, message: Message, timeout_s: float) -> Message:
        if self._writer is None:
            raise UnavailableError("the link to the other process is closed")
        self._write({"question": question, "number": number, "values": message.values}, message.data)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise DeadlineError(f"the other process has not answered {question!r} within {timeout_s:g} s") from None

    def _end_for_client(self, number: int) -> None:
        if number in self._for_clients:
            self._for_clients.remove(number)
            self._may_ask.release()

    def tell(self, question: str, message: Message) -> None:
        """Asks without waiting for the answer. For what is bounded otherwise, such as one message for each request."""
        if self._writer is not None:
            self._write({"question": question, "number": -1, "values": message.values}, message.data)

    def close(self) -> None:
        """Closes this end. May be called again."""
        for number, answer in self._waiting.items():
            self._end_for_client(number)
            if not answer.done():
                answer.set_exception(UnavailableError("the other process has ended"))
        self._waiting.clear()
        for task in self._handling:
            task.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        elif self._reader is None:
            self._end.close()

    def _write(self, head: Mapping[str, Any], data: bytes) -> None:
        if self._writer is not None:
            encoded = json.dumps(head, ensure_ascii=False).encode()
            if len(encoded) > MAX_JSON_BYTES or len(data) > _MAX_BYTES:
                raise MessageTooLargeError(f"{len(encoded) + len(data)} bytes are too many for another process")
            self._writer.write(len(encoded).to_bytes(4, "little") + len(data).to_bytes(4, "little") + encoded + data)

    def _take_answer(self, head: Mapping[str, Any], data: bytes) -> None:
        waiting = self._waiting.pop(head["number"])
        self._end_for_client(head["number"])
        if waiting.done():
            return  # nobody waits for it any more
        if "error" in head:
            error = head["error"]
            waiting.set_exception(
                error_for_reason(error["reason"])(
                    error["message"], metadata=error["metadata"], retry_after_s=error["retry_after_s"]
                )
            )
        else:
            waiting.set_result(Message(head["values"], data))

    def _handle(self, head: Mapping[str, Any], data: bytes) -> None:
        if len(self._handling) >= MAX_HANDLED:
            raise ConnectionError(f"the other process asked {MAX_HANDLED} questions without waiting for answers")
        task = asyncio.create_task(self._answer(head, data), name=f"answer to {head['question']}")
        self._handling.add(task)
        task.add_done_callback(self._handling.discard)

    async def _answer(self, head: Mapping[str, Any], data: bytes) -> None:
        number = head["number"]
        respond = self._write if number >= 0 else _drop
        try:
            answer = await self._handlers[head["question"]](Message(head["values"], data))
            respond({"number": number, "values": answer.values}, answer.data)
        except GenserveError as error:
            described = {
                "reason": error.reason,
                "message": error.message,
                "metadata": error.metadata,
                "retry_after_s": error.retry_after_s,
            }
            respond({"number": number, "error": described}, b"")
        except Exception as error:
            log.exception("question %r failed", head["question"])
            described = {"reason": "", "message": repr(error), "metadata": {}, "retry_after_s": None}
            respond({"number": number, "error": described}, b"")


def _drop(head: Mapping[str, Any], data: bytes) -> None:
    """The answer to a message that asks nothing."""


async def _read(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes] | None:
    """The next frame; None at the end."""
    try:
        lengths = await reader.readexactly(8)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    num_json, num_bytes = int.from_bytes(lengths[:4], "little"), int.from_bytes(lengths[4:], "little")
    if num_json > MAX_JSON_BYTES or num_bytes > _MAX_BYTES:
        raise ConnectionError(f"a frame of {num_json} and {num_bytes} bytes is too large")
    return json.loads(await reader.readexactly(num_json)), await reader.readexactly(num_bytes)
