"""How HTTP peers are asked: two routes of vLLM's servers, two clients.

The routes: `/v1/completions`, OpenAI's, which always sends text, and `/inference/v1/generate`, token ids in and out.
The clients: aiohttp, and one that does no more than a socket and a few searches in bytes, so that nobody is slow
because of a client. Both read server-sent events with msgspec.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

from bench.processes import PeerError
from bench.traces import Trace, Work, closed_loop

COMPLETIONS, TOKENS = "/v1/completions", "/inference/v1/generate"
_PREFIX = b"data: "


class Sampled(msgspec.Struct):
    """The log-probability of a token, of TOKENS."""

    logprob: float


class Logprobs(msgspec.Struct):
    """`content` of TOKENS, `token_logprobs` of COMPLETIONS."""

    content: list[Sampled] | None = None
    token_logprobs: list[float] | None = None


class Choice(msgspec.Struct):
    """The part of a choice that is needed."""

    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    text: str | None = None


class Answer(msgspec.Struct):
    """The part of a chunk that is needed."""

    choices: list[Choice]


class HttpCalls:
    """The requests to one server: of the peer NAME (aiohttp, COMPLETIONS), NAME_bare (the bare client, COMPLETIONS),
    NAME_tokens and NAME_final (the bare client, TOKENS)."""

    def __init__(self, port: int, model: str) -> None:
        self._port = port
        self._model = model
        self._session = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}",
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=600),
        )
        self.idle_connections: list[BareConnection] = []

    async def is_serving(self) -> bool:
        """Whether /health says so."""
        try:
            async with self._session.get("/health") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def generate(self, peer: str, work: Work) -> list[Trace]:
        """One POST for each request."""
        # TOKENS of the Rust front end gives no text.
        tokens = peer.endswith(("_tokens", "_final")) and not work.text
        path, body = (TOKENS, self._tokens_body) if tokens else (COMPLETIONS, self._completions_body)
        post = self._post_bare if peer.endswith(("_bare", "_tokens", "_final")) else self._post_aiohttp
        decode = msgspec.json.Decoder(Answer).decode

        async def stream(number: int, prompt: list[int]) -> Trace:
            content = msgspec.json.encode(body(prompt, work))
            trace = Trace(time.monotonic())
            await post(path, content, lambda data: _add(trace, decode(data), work))
            return trace

        return await closed_loop(work, stream)

    def _completions_body(self, prompt: list[int], work: Work) -> dict[str, Any]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": work.max_tokens, "temperature": 0.0}
        body |= {"ignore_eos": True, "return_token_ids": True, "stream": not work.final_only}
        return {**body, "logprobs": 0} if work.logprobs else body

    def _tokens_body(self, prompt: list[int], work: Work) -> dict[str, Any]:
        sampling: dict[str, Any] = {"max_tokens": work.max_tokens, "temperature": 0.0, "ignore_eos": True}
        sampling["detokenize"] = False
        if work.logprobs:
            sampling["logprobs"] = 0
        return {"token_ids": prompt, "sampling_params": sampling, "stream": not work.final_only}

    async def _post_aiohttp(self, path: str, content: bytes, add: Callable[[bytes | bytearray], None]) -> None:
        headers = {"content-type": "application/json"}
        async with self._session.post(path, data=content, headers=headers) as answer:
            answer.raise_for_status()
            if answer.content_type == "application/json":
                add(await answer.read())
                return
            async for line in answer.content:
                if line.startswith(_PREFIX) and not line.startswith(b"data: [DONE]"):
                    add(line[len(_PREFIX) :])

    async def _post_bare(self, path: str, content: bytes, add: Callable[[bytes | bytearray], None]) -> None:
        connection = None
        while self.idle_connections and (connection is None or not connection.is_open):
            connection = self.idle_connections.pop()  # servers close those that are idle for long
        if connection is None or not connection.is_open:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(BareConnection, "127.0.0.1", self._port)
        try:
            await connection.post(path, content, add)
        except BaseException:
            connection.close()
            raise
        self.idle_connections.append(connection)

    async def close(self) -> None:
        """Closes all connections."""
        for connection in self.idle_connections:
            connection.close()
        await self._session.close()


def _add(trace: Trace, answer: Answer, work: Work) -> None:
    for choice in answer.choices:
        if choice.token_ids:
            trace.arrived_at.append(time.monotonic())
            trace.token_ids += choice.token_ids
            if work.logprobs and choice.logprobs is not None:
                if choice.logprobs.content is not None:
                    trace.logprobs += [each.logprob for each in choice.logprobs.content]
                else:
                    trace.logprobs += choice.logprobs.token_logprobs or ()
        if work.text and choice.text:
            trace.texts.append(choice.text)


class BareConnection(asyncio.Protocol):
    """A connection that is kept, with one request at a time: HTTP/1.1 as vLLM's servers write it, and no more of it."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._events = bytearray()
        self._length: int | None = None  # None: in chunks
        self._in_body = False
        self._done: asyncio.Future[None] | None = None  # of the request under way
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps what writes."""
        self._transport: Any = transport

    async def post(self, path: str, content: bytes, add: Callable[[bytes | bytearray], None]) -> None:
        """Calls `add` with the data of each event, or with the whole answer if it is no stream; returns at its end."""
        self._add = add
        self._done = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        await self._done

    def data_received(self, data: bytes) -> None:
        """Reads as much as is there."""
        self._received += data
        try:
            if self._in_body or self._read_head():
                self._read_body()
        except Exception as error:  # whoever waits for the answer gets it
            self._fail(error)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Fails the request, if there is one."""
        self.is_open = False
        self._fail(error or ConnectionError("the server has closed the connection"))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def close(self) -> None:
        """Closes it."""
        self._transport.close()

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        status, *lines = bytes(self._received[:end]).lower().split(b"\r\n")
        if status.split()[1] != b"200":
            raise PeerError("HTTP", self._received.decode(errors="replace"))
        headers = dict(line.split(b": ", 1) for line in lines)
        self._length = int(headers[b"content-length"]) if b"content-length" in headers else None
        del self._received[: end + 4]
        self._in_body = True
        return True

    def _read_body(self) -> None:
        if self._length is not None:
            if len(self._received) >= self._length:
                self._add(bytes(self._received))
                self._end()
            return
        received, position, is_end = self._received, 0, False
        while not is_end and (line_end := received.find(b"\r\n", position)) >= 0:
            begin = line_end + 2
            size = int(received[position:line_end], 16)
            if len(received) < begin + size + 2:
                break
            is_end = size == 0
            self._events += received[begin : begin + size]
            position = begin + size + 2
        del received[:position]
        if b"\n\n" in self._events:
            *events, rest = self._events.split(b"\n\n")
            self._events = rest
            for event in events:
                if event.startswith(_PREFIX) and not event.startswith(b"data: [DONE]"):
                    self._add(event[len(_PREFIX) :])
        if is_end:
            self._end()

    def _end(self) -> None:
        self._received.clear()
        self._events.clear()
        self._in_body = False
        if self._done is not None and not self._done.done():  # or who waited has given up
            self._done.set_result(None)
