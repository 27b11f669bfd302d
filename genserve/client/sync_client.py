"""The client for threads: the asynchronous one on its own event loop in a background thread.

Each method is declared by naming the asynchronous one, and has its signature, types and documentation, in which
`async with` is `with` and `aclose` is `close`.
"""

import asyncio
import inspect
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Final, Literal, ParamSpec, Protocol, TypeVar, Unpack

from genserve.client.async_client import AsyncClient
from genserve.client.direct.settings import Direct
from genserve.transport.connection import Connection
from genserve.transport.fields import meant_by
from genserve.transport.loop_thread import LoopThread, Mailbox
from genserve.transport.settings import ConnectionSettings
from genserve.transport.streams import Closing
from genserve.transport.timeouts import Timeouts

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# How late a call may end: gRPC ends it at its deadline, and only a blocked loop does not report this.
LATE_S: Final = 5.0
_END: Final[Any] = object()

Default = Literal["control_s", "generate_s", "push_s"]
Slack = Literal["pause_slack_s", "undo_slack_s"]


class _AsyncStream(Protocol[T_co]):
    def __anext__(self) -> Coroutine[Any, Any, T_co]: ...

    def cancel(self) -> None: ...


class _Limit:
    """The longest time that a thread waits for a method: its `timeout_s`, by default `default` of the client's
    Timeouts, plus `slack`. None = no limit, which the caller has requested."""

    def __init__(self, method: Callable[..., Any], default: Default, slack: Slack | None) -> None:
        self._signature = inspect.signature(method)
        self._name = method.__name__
        self._default = default
        self._slack = slack

    def seconds(self, client: "Client", args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
        """The limit of a call with these arguments, in seconds. Raises TypeError where the method would."""
        try:
            arguments = self._signature.bind(client._client, *args, **kwargs)
        except TypeError as error:
            known = self._signature.parameters
            takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
            unknown = [] if takes_any else sorted(kwargs.keys() - known)
            raise TypeError(f"{self._name}() {error}{meant_by(unknown, known)}") from None
        arguments.apply_defaults()
        timeouts = client._timeouts
        timeout_s = Connection.grpc_timeout_s(arguments.arguments["timeout_s"], getattr(timeouts, self._default))
        slack_s: float = 0.0 if self._slack is None else getattr(timeouts, self._slack)
        return None if timeout_s is None else max(timeout_s, 0.0) + slack_s + LATE_S


def _documented(function: Callable[P, T]) -> Callable[P, T]:
    function.__doc__ = (function.__doc__ or "").replace("`async with`", "`with`").replace("`aclose`", "`close`")
    return function


def blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
    default: Default = "control_s",
    slack: Slack | None = None,
) -> "Callable[Concatenate[Client, P], T]":
    """A method that waits for the asynchronous one. `progress` is called in the thread that waits."""
    limit = _Limit(method, default, slack)

    @_documented
    @wraps(method)
    def call(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        limit_s = limit.seconds(client, args, kwargs)
        mailbox: Mailbox | None = None
        progress: Any = kwargs.get("progress")
        if progress is not None:
            mailbox = Mailbox(progress)
            kwargs["progress"] = mailbox.put
        return client._thread.run(method(client._client, *args, **kwargs), limit_s, mailbox)

    return call


def blocking_stream(
    method: Callable[Concatenate[AsyncClient, P], _AsyncStream[T]], default: Default = "control_s"
) -> "Callable[Concatenate[Client, P], BlockingStream[T]]":
    """A method that starts the asynchronous stream and iterates over it."""
    limit = _Limit(method, default, None)

    @_documented
    @wraps(method)
    def begin(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> "BlockingStream[T]":
        async def start() -> _AsyncStream[T]:
            return method(client._client, *args, **kwargs)

        limit_s = limit.seconds(client, args, kwargs)
        return BlockingStream(client, client._thread.run(start(), limit_s), limit_s)

    return begin


def blocking_context(
    method: Callable[Concatenate[AsyncClient, P], AbstractAsyncContextManager[T]],
    default: Default = "control_s",
    slack: Slack | None = None,
) -> "Callable[Concatenate[Client, P], AbstractContextManager[T]]":
    """A context manager around the asynchronous one."""
    limit = _Limit(method, default, slack)

    @_documented
    @wraps(method)
    def hold(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> "BlockingContext[T]":
        return BlockingContext(client, method(client._client, *args, **kwargs), limit.seconds(client, args, kwargs))

    return hold


class BlockingStream(Closing, Iterator[T]):
    """The items of a call that has begun.

    The call is cancelled, which ends its requests in the daemon, by `close()`, by leaving `with`, by an interrupt
    (Ctrl-C) during a wait for an item, and when the stream is dropped unfinished. Iterating raises a `GenserveError` if
    the call failed, ClientClosedError if the client is closed.
    """

    def __init__(self, client: "Client", stream: _AsyncStream[T], limit_s: float | None) -> None:
        self._client = client  # which must not be collected before
        self._stream = stream
        self._ends_at = None if limit_s is None else time.monotonic() + limit_s

    def __next__(self) -> T:
        """The next item."""
        limit_s = None if self._ends_at is None else max(self._ends_at - time.monotonic(), LATE_S)
        try:
            item = self._client._thread.run(_next(self._stream), limit_s)
        except KeyboardInterrupt:
            self.close()
            raise
        if item is _END:
            raise StopIteration
        return item

    def close(self) -> None:
        """Cancels the call unless it is over. Does not wait."""
        self._client._thread.post(self._stream.cancel)


class BlockingContext(AbstractContextManager[T, bool | None]):
    """An asynchronous context manager on the client's loop. It is also ended when this object is dropped."""

    def __init__(self, client: "Client", manager: AbstractAsyncContextManager[T], limit_s: float | None) -> None:
        self._client = client
        self._manager = manager
        self._limit_s = limit_s

    def __enter__(self) -> T:
        return self._client._thread.run(_enter(self._manager), self._limit_s)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        # KeyboardInterrupt is not for code on the loop: there it becomes a cancellation.
        inner = exc if exc is None or isinstance(exc, Exception) else asyncio.CancelledError()
        control_s = self._client._timeouts.control_s
        limit_s = None if control_s is None else control_s + LATE_S
        is_handled = self._client._thread.run(_exit(self._manager, inner), limit_s)
        return is_handled if inner is exc else None


class Client(Closing):
    """`AsyncClient` for code without asyncio: scripts, training loops, notebooks.

    The methods of `AsyncClient` except `stream_many`, with the same errors. `stream`, `generate_as_completed` and
    `watch_status` are iterators that can be closed, `paused` is a context manager. May be used from several threads at
    once, also where an event loop is running. An interrupt (Ctrl-C) cancels the call it hits. `progress` is called in
    the thread that has made the call, with what is latest then, and may make other calls.

    Every call ends: with its result, at its deadline, or with ClientClosedError when the client is closed, which the
    end of the program does too. In a forked process a client raises ClientMisuseError: make it there.

        with Client("127.0.0.1:50051") as client:
            for delta in client.stream("Once upon a time", max_tokens=16):
                print(delta.text, end="")
    """

    def __init__(
        self, target: str | None = None, *, direct: bool | Direct = False, **settings: Unpack[ConnectionSettings]
    ) -> None:
        self._client = AsyncClient(target, direct=direct, **settings)
        self._thread = LoopThread("genserve client", self._client.close)
        weakref.finalize(self, self._thread.stop).atexit = False

    @property
    def _timeouts(self) -> Timeouts:
        return self._client._connection.timeouts

    generate = blocking(AsyncClient.generate, "generate_s")
    generate_many = blocking(AsyncClient.generate_many, "generate_s")
    generate_as_completed = blocking_stream(AsyncClient.generate_as_completed, "generate_s")
    stream = blocking_stream(AsyncClient.stream, "generate_s")
    abort = blocking(AsyncClient.abort)
    tokenize = blocking(AsyncClient.tokenize)
    detokenize = blocking(AsyncClient.detokenize)
    push_weights = blocking(AsyncClient.push_weights, "push_s")
    load_weights = blocking(AsyncClient.load_weights, "push_s")
    get_push = blocking(AsyncClient.get_push)
    commit_push = blocking(AsyncClient.commit_push, "push_s")
    discard_push = blocking(AsyncClient.discard_push)
    get_weights = blocking(AsyncClient.get_weights)
    pull_weights = blocking(AsyncClient.pull_weights, "push_s")
    push_lora = blocking(AsyncClient.push_lora, "push_s")
    load_lora = blocking(AsyncClient.load_lora, slack="pause_slack_s")
    unload_lora = blocking(AsyncClient.unload_lora)
    list_loras = blocking(AsyncClient.list_loras)
    init_weight_transfer = blocking(AsyncClient.init_weight_transfer, slack="undo_slack_s")
    start_weight_update = blocking(AsyncClient.start_weight_update, slack="undo_slack_s")
    update_weights = blocking(AsyncClient.update_weights, slack="undo_slack_s")
    finish_weight_update = blocking(AsyncClient.finish_weight_update, slack="undo_slack_s")
    pause = blocking(AsyncClient.pause, slack="pause_slack_s")
    renew_pause = blocking(AsyncClient.renew_pause)
    resume = blocking(AsyncClient.resume)
    paused = blocking_context(AsyncClient.paused, slack="pause_slack_s")
    status = blocking(AsyncClient.status)
    watch_status = blocking_stream(AsyncClient.watch_status)
    server_info = blocking(AsyncClient.server_info)
    reset_cache = blocking(AsyncClient.reset_cache)
    sleep = blocking(AsyncClient.sleep, slack="pause_slack_s")
    wake_up = blocking(AsyncClient.wake_up)
    drain = blocking(AsyncClient.drain)
    list_replicas = blocking(AsyncClient.list_replicas)
    watch_replicas = blocking_stream(AsyncClient.watch_replicas)
    add_replica = blocking(AsyncClient.add_replica)
    remove_replica = blocking(AsyncClient.remove_replica)
    drain_replica = blocking(AsyncClient.drain_replica)
    wait_ready = blocking(AsyncClient.wait_ready)

    def close(self) -> None:
        """Closes the connection and ends the thread. Calls in progress raise ClientClosedError. May be repeated."""
        self._thread.close()


async def _next(stream: _AsyncStream[T]) -> T:
    """The next item, or `_END` at the end, because StopAsyncIteration cannot leave a future."""
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        end: T = _END
        return end


async def _enter(manager: AbstractAsyncContextManager[T]) -> T:
    return await manager.__aenter__()


async def _exit(manager: AbstractAsyncContextManager[Any], error: BaseException | None) -> bool | None:
    return await manager.__aexit__(None if error is None else type(error), error, None)
