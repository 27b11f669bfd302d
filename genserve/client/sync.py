"""The client for threads: the asynchronous one on an event loop of its own in a background thread.

Each method is declared by naming the asynchronous one; signature, types and documentation are its.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, Unpack

from genserve.client.async_client import AsyncClient
from genserve.client.channel import DEFAULT_TARGET, ConnectionSettings

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Stream(Protocol[T_co]):
    def __aiter__(self) -> AsyncIterator[T_co]: ...

    def __anext__(self) -> Coroutine[Any, Any, T_co]: ...

    def aclose(self) -> Coroutine[Any, Any, None]: ...


def blocking(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> "Callable[Concatenate[Client, P], T]":
    """A method that waits for the asynchronous one."""

    @wraps(method)
    def call(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._run(method(client._client, *args, **kwargs))

    return call


def blocking_stream(
    method: Callable[Concatenate[AsyncClient, P], _Stream[T]],
) -> "Callable[Concatenate[Client, P], Generator[T, None, None]]":
    """A generator over the asynchronous stream; the call begins with the first item, closing it cancels the call."""

    @wraps(method)
    def iterate(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        async def start() -> _Stream[T]:
            return method(client._client, *args, **kwargs)

        stream = client._run(start())
        end = object()
        try:
            while (item := client._run(_next(stream, end))) is not end:
                yield item  # type: ignore[misc]
        finally:
            client._run(stream.aclose())

    return iterate


def blocking_context(
    method: Callable[Concatenate[AsyncClient, P], AbstractAsyncContextManager[T]],
) -> "Callable[Concatenate[Client, P], AbstractContextManager[T]]":
    """A context manager around the asynchronous one."""

    @contextmanager
    def hold(client: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        manager = method(client._client, *args, **kwargs)
        value = client._run(_enter(manager))
        try:
            yield value
        except Exception as error:
            if not client._run(_exit(manager, error)):
                raise
        except BaseException:
            # KeyboardInterrupt must not be raised in the loop's thread: it would end the loop.
            client._run(_exit(manager, asyncio.CancelledError()))
            raise
        else:
            client._run(_exit(manager, None))

    return wraps(method)(hold)


class Client:
    """`AsyncClient` for code without asyncio: scripts, training loops, notebooks.

    Same methods and errors; `stream`, `generate_as_completed` and `watch_status` are generators, `paused` is a context
    manager. May be used from several threads at once, also where an event loop is running. An interrupt (Ctrl-C)
    cancels the call it hits.

        with Client("127.0.0.1:50051") as client:
            for delta in client.stream("Once upon a time", max_tokens=16):
                print(delta.text, end="")
    """

    def __init__(self, target: str = DEFAULT_TARGET, **settings: Unpack[ConnectionSettings]) -> None:
        self._client = AsyncClient(target, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="genserve client", daemon=True)
        self._thread.start()

    generate = blocking(AsyncClient.generate)
    generate_many = blocking(AsyncClient.generate_many)
    generate_as_completed = blocking_stream(AsyncClient.generate_as_completed)
    stream = blocking_stream(AsyncClient.stream)
    abort = blocking(AsyncClient.abort)
    tokenize = blocking(AsyncClient.tokenize)
    detokenize = blocking(AsyncClient.detokenize)
    push_weights = blocking(AsyncClient.push_weights)
    get_push = blocking(AsyncClient.get_push)
    commit_push = blocking(AsyncClient.commit_push)
    discard_push = blocking(AsyncClient.discard_push)
    get_weights = blocking(AsyncClient.get_weights)
    pull_weights = blocking(AsyncClient.pull_weights)
    push_lora = blocking(AsyncClient.push_lora)
    load_lora = blocking(AsyncClient.load_lora)
    unload_lora = blocking(AsyncClient.unload_lora)
    list_loras = blocking(AsyncClient.list_loras)
    init_weight_transfer = blocking(AsyncClient.init_weight_transfer)
    start_weight_update = blocking(AsyncClient.start_weight_update)
    update_weights = blocking(AsyncClient.update_weights)
    finish_weight_update = blocking(AsyncClient.finish_weight_update)
    pause = blocking(AsyncClient.pause)
    renew_pause = blocking(AsyncClient.renew_pause)
    resume = blocking(AsyncClient.resume)
    paused = blocking_context(AsyncClient.paused)
    status = blocking(AsyncClient.status)
    watch_status = blocking_stream(AsyncClient.watch_status)
    server_info = blocking(AsyncClient.server_info)
    reset_cache = blocking(AsyncClient.reset_cache)
    sleep = blocking(AsyncClient.sleep)
    wake_up = blocking(AsyncClient.wake_up)
    wait_ready = blocking(AsyncClient.wait_ready)

    def close(self) -> None:
        """Closes the connection and ends the thread; calls under way are cancelled. May be repeated."""
        if self._loop.is_closed():
            return
        self._run(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the client's loop; an exception here, such as KeyboardInterrupt, cancels it."""
        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _shut_down(self) -> None:
        await self._client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_default_executor()


async def _next(stream: _Stream[T], end: object) -> T | object:
    return await anext(aiter(stream), end)


async def _enter(manager: AbstractAsyncContextManager[T]) -> T:
    return await manager.__aenter__()


async def _exit(manager: AbstractAsyncContextManager[Any], error: BaseException | None) -> bool | None:
    return await manager.__aexit__(None if error is None else type(error), error, None)
