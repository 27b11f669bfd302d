"""The calls of GenerationService, and streams of many requests whose results come as they are completed."""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, Unpack

from genserve.client.direct.calls import DirectGenerateMany
from genserve.client.direct.settings import Direct
from genserve.client.direct.tokens import DirectTokens
from genserve.client.generation.many import ManyItem, ManyStream, StreamOverError
from genserve.client.generation.options import (
    ChatMessage,
    ChatOptions,
    GenerateOptions,
    PromptLike,
    chat,
    generate_request,
    generate_requests,
    is_chat,
)
from genserve.client.generation.results import Delta, Generation
from genserve.errors import GenserveError, InvalidFieldError, QueueFullError
from genserve.transport.channels import FrontendChannels
from genserve.transport.connection import UNSET, Connection, ServiceCalls, Timeout
from genserve.transport.fields import build, naming
from genserve.transport.streams import AsyncClosing, ResponseStream
from genserve.v1 import generation_pb2

# Half of the default limit of a daemon for all its clients, and more than an engine runs at once.
MAX_IN_FLIGHT: Final = 4096
_RETRY_AFTER_S: Final = 0.5  # if the daemon gives no delay


class CompletedStream(AsyncClosing, AsyncIterator[tuple[int, Generation]]):
    """Yields (position among the prompts, generation) as each one ends; a failed one has an `error`.

    At most MAX_IN_FLIGHT requests run at once. If the daemon refuses a request because its queue is full, the request
    is sent again when the queue has room, until the deadline of the stream. Running requests are ended by `aclose()`,
    by leaving `async with`, and when the stream is dropped. A wait for an item may be cancelled.
    """

    def __init__(self, many: ManyStream, messages: Sequence[generation_pb2.GenerateRequest]) -> None:
        """`messages` are sent over `many`, which nobody else uses. They get ids here."""
        for message in messages:
            message.request_id = many.next_id()
        self._many = many
        self._unfinished = {message.request_id: (index, Generation()) for index, message in enumerate(messages)}
        self._submissions = _Submissions(many, messages)
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._submitting = asyncio.create_task(self._submissions.run())
        self._closed = False

    async def __anext__(self) -> tuple[int, Generation]:
        """The next complete generation. Raises the error that ended the stream."""
        try:
            while True:
                completed = self._add(await anext(self._many))
                if completed is not None:
                    return completed
        except (GenserveError, StopAsyncIteration) as end:
            if not self._unfinished:  # every answer is here, so that only the end of the call can be lost
                raise StopAsyncIteration from end
            # An error of sending says more than the end of the stream.
            if not self._closed and self._submitting.done() and not self._submitting.cancelled():
                self._submitting.result()
            if not self._closed and self._unfinished and isinstance(end, StopAsyncIteration):
                num_running = len(self._unfinished)
                raise GenserveError(f"the daemon ended the stream while {num_running} requests were running") from end
            raise

    def _add(self, item: ManyItem) -> tuple[int, Generation] | None:
        if item.request_id not in self._unfinished:  # an error without the id of a request
            raise item.error or GenserveError(f"the daemon answered for {item.request_id!r}, which is not running")
        position, generation = self._unfinished[item.request_id]
        if isinstance(item.error, QueueFullError) and generation.prompt is None:  # it has not begun
            self._submissions.refused(item.request_id, item.error.retry_after_s)
            return None
        if item.delta is not None:
            generation.add(item.delta)
        if not item.is_last:
            return None
        del self._unfinished[item.request_id]
        self._submissions.ended(item.request_id)
        generation.error = item.error
        return position, generation

    def cancel(self) -> None:
        """`aclose` for callbacks."""
        self._closed = True
        self._submitting.cancel()
        self._many.cancel()

    def __del__(self) -> None:
        # See MessageReader: the task would keep the stream alive.
        if self._pid == os.getpid():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._submitting.cancel)


class _Submissions:
    """Sends requests, but no more at once than the daemon accepts.

    After a refusal, the limit of running requests is the number that were not refused: one that ends makes room for
    one. Because others may have made room too, the limit doubles after each delay without a refusal.
    """

    def __init__(self, many: ManyStream, messages: Sequence[generation_pb2.GenerateRequest]) -> None:
        self._many = many
        self._waiting = deque(messages)
        self._in_flight: dict[str, generation_pb2.GenerateRequest] = {}
        self._limit = MAX_IN_FLIGHT
        self._holds = False
        self._relaxes_at = 0.0
        self._delay_s = _RETRY_AFTER_S
        self._clock = asyncio.get_running_loop().time
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Returns when all requests have ended. A request that cannot be sent ends the stream, because its reader would
        wait for ever."""
        try:
            while self._waiting or self._in_flight:
                self._changed.clear()  # first: requests may end while another one is being sent
                while self._waiting and not self._holds and len(self._in_flight) < self._limit:
                    message = self._waiting.popleft()
                    self._in_flight[message.request_id] = message
                    await self._many.put(message)
                await self._change()
            await self._many.done()
        except StreamOverError:
            return  # the reader of the stream gets this error too
        except BaseException:
            self._many.cancel()
            raise

    def refused(self, request_id: str, retry_after_s: float | None) -> None:
        """Records that the daemon's queue was full. The request is sent first when there is room."""
        self._waiting.appendleft(self._in_flight.pop(request_id))
        self._limit = max(len(self._in_flight), 1)
        self._delay_s = _RETRY_AFTER_S if retry_after_s is None else retry_after_s
        self._relaxes_at = self._clock() + self._delay_s
        self._holds = True
        self._changed.set()

    def ended(self, request_id: str) -> None:
        """Records that a request has ended, which makes room for another one."""
        del self._in_flight[request_id]
        self._holds = False
        self._changed.set()

    async def _change(self) -> None:
        """Returns when a request has ended or was refused, or the limit has doubled."""
        is_limited = bool(self._waiting) and self._limit < MAX_IN_FLIGHT
        try:
            async with asyncio.timeout_at(self._relaxes_at if is_limited else None):
                await self._changed.wait()
        except TimeoutError:
            self._limit = min(2 * self._limit, MAX_IN_FLIGHT)
            self._relaxes_at = self._clock() + self._delay_s
            self._holds = False


class TokenCalls(Protocol):
    """Where calls for tokens go: to a daemon and its front ends, or to the replicas of a fleet."""

    def generate(self, request: generation_pb2.GenerateRequest, timeout_s: float | None) -> tuple[Any, str]:
        """Begins a call of Generate. Returns it with what is called, for people."""

    def generate_many(self, timeout_s: float | None) -> tuple[Any, str]:
        """Begins a call of GenerateMany. Returns it with what is called, for people."""

    def abort_waiting(self, request_ids: Sequence[str] | None) -> list[str]:
        """Ends the requests with these ids, None = all, that have not been sent yet. Returns their ids."""

    async def find(self) -> None:
        """Returns when it is known where calls go, as far as it can be."""


@dataclass(frozen=True, slots=True)
class AbortResult:
    """The requests that were running and are ended, and the ids that were not running."""

    aborted_ids: list[str]
    unknown_ids: list[str]


class GenerationCalls(ServiceCalls):
    """Generation of tokens."""

    def __init__(self, connection: Connection, direct: Direct | None = None) -> None:
        """`direct`: how the replicas of a router are called, None = calls go to the daemon or the router itself."""
        super().__init__(connection)
        self._frontends = FrontendChannels(connection)
        self._tokens: TokenCalls = self._frontends if direct is None else DirectTokens(connection, direct)

    async def generate(
        self, prompt: PromptLike, *, timeout_s: Timeout = UNSET, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Generates from one prompt and returns the whole result.

        `prompt` is text, token ids, or the messages of a chat. Cancelling the call ends the request in the daemon. The
        daemon sends one message at the end unless `stream_interval` says otherwise. Raises a `GenserveError`. A request
        that fails or exceeds `timeout_s` returns nothing: use `time_budget_s` to keep the tokens so far.
        """
        if options.get("stream_interval") is None:
            options["stream_interval"] = 0
        generation = Generation()
        async with self.stream(prompt, timeout_s=timeout_s, **options) as deltas:
            async for delta in deltas:
                generation.add(delta)
        if generation.usage is None:
            raise GenserveError("the daemon ended the stream before the request")
        return generation

    def stream(
        self, prompt: PromptLike, *, timeout_s: Timeout = UNSET, **options: Unpack[GenerateOptions]
    ) -> ResponseStream[Delta]:
        """Generates from one prompt and yields strict deltas as they come. Errors are raised while iterating.

        Leaving `async with` ends the request in the daemon. Use it where a variable has the stream and the task may be
        cancelled: the task keeps its error, the error the variables of its frames, and the request then runs on. If a
        wait for a delta is cancelled, the delta is not lost.
        """
        request = generate_request(prompt, options)
        timeout = self._connection.grpc_timeout_s(timeout_s, self._connection.timeouts.generate_s)
        call, target = self._tokens.generate(request, timeout)
        return ResponseStream(call, Delta, partial(self._connection.typed_errors, target))

    def stream_many(self, *, timeout_s: Timeout = UNSET) -> ManyStream:
        """Opens one stream for many requests: `submit` them at any time, iterate over what they gain.

        A message of the daemon carries what all of them gained in one step of the engine, which makes many streams at
        once much cheaper than `stream` for each. `timeout_s` is the deadline of the whole stream.

            async with client.stream_many() as many:
                for prompt in prompts:
                    await many.submit(prompt, max_tokens=64)
                await many.done()
                async for item in many:
                    print(item.request_id, item.error or item.delta.text)
        """
        timeout = self._connection.grpc_timeout_s(timeout_s, self._connection.timeouts.generate_s)
        call, target = self._tokens.generate_many(timeout)
        abort = call.abort if isinstance(call, DirectGenerateMany) else self.abort
        return ManyStream(call, target, self._connection, abort)

    def generate_as_completed(
        self, prompts: Iterable[PromptLike], *, timeout_s: Timeout = UNSET, **options: Unpack[GenerateOptions]
    ) -> CompletedStream:
        """Generates from many prompts at once; yields (position in `prompts`, generation) as each one ends.

        The options apply to every prompt. A request that fails yields its tokens so far, with its `error`. Closing the
        stream (`async with`, `aclose`) ends the running requests. Iterating raises the error that ends the whole
        stream. If the daemon's queue is full, the rest is sent when it has room, until `timeout_s` has passed.
        """
        if options.get("request_id") is not None:
            raise InvalidFieldError.of("request_id", "is the id of one request; use stream_many to name several")
        if options.get("stream_interval") is None:
            options["stream_interval"] = 0
        messages = generate_requests(prompts, options)
        return CompletedStream(self.stream_many(timeout_s=timeout_s), messages)

    async def generate_many(
        self,
        prompts: Iterable[PromptLike],
        *,
        raise_errors: bool = True,
        timeout_s: Timeout = UNSET,
        **options: Unpack[GenerateOptions],
    ) -> list[Generation]:
        """Generates from many prompts at once over one stream and returns the generations in the order of the prompts.

        The options apply to every prompt. The first error of a request is raised and ends the others. With
        `raise_errors=False` the error is the `error` of its generation, and the others continue. Cancelling the call
        ends all requests. A full queue is not an error: see `generate_as_completed`.
        """
        results: dict[int, Generation] = {}
        async with self.generate_as_completed(prompts, timeout_s=timeout_s, **options) as completed:
            async for position, generation in completed:
                if generation.error is not None and raise_errors:
                    raise generation.error
                results[position] = generation
        return [results[position] for position in range(len(results))]

    async def abort(
        self, request_ids: Sequence[str] = (), *, all: bool = False, timeout_s: Timeout = UNSET
    ) -> AbortResult:
        """Ends the named requests of any client, or `all`. Their streams finish as `aborted` and keep their tokens."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        request = build(generation_pb2.AbortRequest, {"request_ids": ids, "all": all})
        waited = self._tokens.abort_waiting(None if all else ids)
        response = await self._connection.unary(self._connection.generation.Abort, request, timeout_s)
        aborted = dict.fromkeys([*waited, *response.aborted_ids])
        return AbortResult(list(aborted), [each for each in response.unknown_ids if each not in aborted])

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        add_special_tokens: bool | None = None,
        timeout_s: Timeout = UNSET,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """The token ids that `generate` would use for text or the messages of a chat."""
        request = generation_pb2.TokenizeRequest()
        with naming("prompt"):
            if isinstance(prompt, str):
                request.text = prompt
            elif is_chat(prompt):
                request.chat.CopyFrom(chat(prompt, options))
            else:
                raise TypeError("must be text or a list of chat messages")
        if add_special_tokens is not None:
            with naming("add_special_tokens"):
                request.add_special_tokens = add_special_tokens
        response = await self._connection.unary(self._connection.generation.Tokenize, request, timeout_s)
        return list(response.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: Timeout = UNSET
    ) -> str:
        """The text of token ids."""
        fields = {"token_ids": token_ids, "skip_special_tokens": skip_special_tokens}
        request = build(generation_pb2.DetokenizeRequest, fields)
        response = await self._connection.unary(self._connection.generation.Detokenize, request, timeout_s)
        return response.text
