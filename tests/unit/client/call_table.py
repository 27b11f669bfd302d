"""Every public call of both clients, with arguments, and what became of it. Also a program, for forks and exits."""

import asyncio
import contextlib
import functools
import gc
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from genserve.client import AsyncClient, Client, Timeouts
from genserve.tensors.safetensors import StoredTensor
from genserve.transport.connection import Timeout, Unset

TIMEOUT_S: Final = 0.5
LONG_S: Final = 60.0
WEIGHTS: Final = {"w": StoredTensor("w", "U8", (4,), memoryview(b"abcd"))}

ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "generate": ("x",),
    "generate_many": (["x", "y"],),
    "generate_as_completed": (["x", "y"],),
    "stream": ("x",),
    "stream_many": (),
    "abort": ("a",),
    "tokenize": ("x",),
    "detokenize": ([1],),
    "push_weights": (WEIGHTS,),
    "get_push": ("p",),
    "load_weights": ("/c",),
    "commit_push": ("p",),
    "discard_push": ("p",),
    "get_weights": (),
    "pull_weights": (),
    "push_lora": ("a", WEIGHTS, {"r": 1}),
    "load_lora": ("a", "/a"),
    "unload_lora": ("a",),
    "list_loras": (),
    "init_weight_transfer": ({},),
    "start_weight_update": (),
    "update_weights": ({},),
    "finish_weight_update": (),
    "pause": (),
    "renew_pause": ("l",),
    "resume": ("l",),
    "paused": (),
    "status": (),
    "watch_status": (),
    "server_info": (),
    "reset_cache": (),
    "sleep": (),
    "wake_up": (),
    "drain": (),
    "list_replicas": (),
    "watch_replicas": (),
    "add_replica": ("a:1",),
    "remove_replica": ("a:1",),
    "drain_replica": ("a:1",),
    "wait_ready": (),
    "close": (),
}
"""By the method's name. A new method without a row here fails `test_every_public_call_is_in_the_table`."""

OPTIONS: Final[dict[str, dict[str, Any]]] = {"push_weights": {"version": 1}}


@dataclass(frozen=True)
class Outcome:
    """`ended`: the error's class, or "result"."""

    ended: str
    elapsed_s: float


def public_calls(kind: type) -> set[str]:
    """Names of the public methods of a client."""
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def timeouts(timeout_s: float = TIMEOUT_S) -> Timeouts:
    """So short that also calls without an own timeout, such as leaving `paused`, are."""
    return Timeouts(control_s=timeout_s, generate_s=timeout_s, push_s=timeout_s, pause_slack_s=0.1, undo_slack_s=0.1)


def call(client: Client, name: str, timeout_s: Timeout = TIMEOUT_S) -> Outcome:
    """Makes one call and reads what it gives to its end. UNSET: without a timeout."""
    began_at = time.monotonic()
    try:
        result = getattr(client, name)(*ARGUMENTS[name], **_options(name, timeout_s))
        if name == "paused":
            with result:
                pass
        elif isinstance(result, Iterator):
            for _ in result:
                pass
        ended = "result"
    except BaseException as error:
        ended = type(error).__name__
    return Outcome(ended, time.monotonic() - began_at)


async def call_async(client: AsyncClient, name: str, timeout_s: Timeout = TIMEOUT_S) -> Outcome:
    """The same for asyncio."""
    began_at = time.monotonic()
    try:
        result = getattr(client, name)(*ARGUMENTS[name], **_options(name, timeout_s))
        if name == "stream_many":
            await result.submit("x")
            await result.done()
        if inspect.isawaitable(result):
            await result
        elif hasattr(result, "__anext__"):
            async for _ in result:
                pass
        elif hasattr(result, "__aenter__"):
            async with result:
                pass
        ended = "result"
    except BaseException as error:
        ended = type(error).__name__
    return Outcome(ended, time.monotonic() - began_at)


def call_all(client: Client, names: set[str], timeout_s: float = TIMEOUT_S) -> dict[str, Outcome]:
    """Every call in a thread of its own, all at once; one that does not end is left out."""
    outcomes: dict[str, Outcome] = {}

    def run(name: str) -> None:
        outcomes[name] = call(client, name, timeout_s)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    give_up_at = time.monotonic() + timeout_s + 20
    for thread in threads:
        thread.join(max(give_up_at - time.monotonic(), 0))
    return dict(outcomes)


async def call_all_async(client: AsyncClient, names: set[str], timeout_s: float = TIMEOUT_S) -> dict[str, Outcome]:
    """The same for asyncio."""
    tasks = {name: asyncio.create_task(call_async(client, name, timeout_s)) for name in names}
    await asyncio.wait(tasks.values(), timeout=timeout_s + 20)
    return {name: task.result() for name, task in tasks.items() if task.done()}


class MeddlingWeights(dict[str, Any]):
    """Weights that a client reads on its event loop, where they run `meddle`."""

    def __init__(self, meddle: Any) -> None:
        super().__init__(WEIGHTS)
        self._meddle = meddle

    def items(self) -> Any:
        self._meddle()
        return super().items()


def _options(name: str, timeout_s: Timeout) -> dict[str, Any]:
    timeout = {} if name == "close" or isinstance(timeout_s, Unset) else {"timeout_s": timeout_s}
    return {**timeout, **OPTIONS.get(name, {})}


# --- as a program: one line of JSON, {call: error}, for each report


def _report(outcomes: dict[str, Outcome]) -> None:
    print(json.dumps({name: (each.ended, each.elapsed_s) for name, each in outcomes.items()}), flush=True)


def fork(target: str) -> None:
    """Uses both clients and forks; the child makes all calls, with new clients too, and both end by themselves."""
    client = Client(target, timeouts=timeouts())
    begun = client.stream("x", timeout_s=LONG_S)
    call(client, "status")
    async_client = AsyncClient(target, timeouts=timeouts())
    asyncio.run(call_async(async_client, "status"))
    child = os.fork()
    if child != 0:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    with contextlib.suppress(BaseException):
        next(begun)
    for each in (client, Client(target, timeouts=timeouts())):
        _report({name: call(each, name) for name in sorted(public_calls(Client) - {"close"})})
    for async_each in (async_client, AsyncClient(target, timeouts=timeouts())):
        _report(asyncio.run(call_all_async(async_each, public_calls(AsyncClient) - {"close"})))
    _report({"close": call(client, "close"), "close_async": asyncio.run(call_async(async_client, "close"))})


def _without_errors(wait: Callable[[], object]) -> None:
    with contextlib.suppress(BaseException):
        wait()


class AtTeardown:
    """Makes all calls when the interpreter takes the module apart."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __del__(self) -> None:
        _report({name: call(self._client, name) for name in sorted(public_calls(Client))})


def leave(target: str) -> None:
    """Ends with a begun stream of every kind in a global, with threads that wait, and calls on from a finaliser."""
    client = Client(target, timeouts=timeouts())
    streams = [client.stream("x"), client.generate_as_completed(["x"]), client.watch_status()]
    held = client.paused(timeout_s=LONG_S)
    waiting = [*(functools.partial(next, stream) for stream in streams), held.__enter__]
    for wait in waiting:
        threading.Thread(target=_without_errors, args=(wait,), daemon=True).start()

    async def begin() -> Any:
        async_client = AsyncClient(target)
        stream = async_client.stream("x")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.1)
        return async_client, stream

    gc.disable()  # all of it is there at the end
    globals()["left"] = [client, streams, held, asyncio.run(begin()), AtTeardown(client)]


if __name__ == "__main__":
    {"fork": fork, "leave": leave}[sys.argv[1]](sys.argv[2])
