"""Every public call of both clients ends in every state that a client can be in: with its result, at its deadline, or
with an error that says what the state is. What is tested is the table, calls by states; the calls of a state run at
once."""

import asyncio
import gc
import json
import re
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from genserve.client import AsyncClient, Client, ClientClosedError
from genserve.errors import DeadlineError
from tests.support.patience import START_S, STEP_S, until
from tests.support.silent_daemon import SilentDaemon, silent_daemon, silent_socket
from tests.unit.client.call_table import (
    ARGUMENTS,
    LONG_S,
    TIMEOUT_S,
    MeddlingWeights,
    Outcome,
    call,
    call_all,
    call_all_async,
    public_calls,
    timeouts,
)

SLACK_S = 20.0  # of a loaded machine
CALLS, ASYNC_CALLS = public_calls(Client), public_calls(AsyncClient)


@pytest.fixture
async def silent() -> AsyncIterator[SilentDaemon]:
    async with silent_daemon() as daemon:
        yield daemon


def assert_all_end(outcomes: dict[str, Outcome], names: set[str], expected: str) -> None:
    """Every call has ended, in time, as expected; closing has always a result."""
    wanted = {name: "result" if name == "close" else expected for name in names}
    assert {name: outcome.ended for name, outcome in outcomes.items()} == wanted
    assert {name: each for name, each in outcomes.items() if each.elapsed_s > TIMEOUT_S + SLACK_S} == {}


def test_every_public_call_is_in_the_table() -> None:
    """A new method needs a row, and the two clients have the same but for what needs a loop."""
    assert ARGUMENTS.keys() == ASYNC_CALLS
    assert ARGUMENTS.keys() - {"stream_many"} == CALLS


@pytest.mark.parametrize("greets", [True, False])
async def test_calls_of_a_silent_daemon_end_at_their_deadline(silent: SilentDaemon, greets: bool) -> None:
    """Whether it takes the calls or nothing but the connection."""
    async with silent_socket() as address:
        target = silent.target if greets else address
        names = CALLS - {"close"}
        with Client(target, timeouts=timeouts()) as client:
            assert_all_end(await asyncio.to_thread(call_all, client, names), names, "DeadlineError")
        names = ASYNC_CALLS - {"close"}
        async with AsyncClient(target, timeouts=timeouts()) as async_client:
            assert_all_end(await call_all_async(async_client, names), names, "DeadlineError")


async def test_calls_of_a_closed_client_say_so(silent: SilentDaemon) -> None:
    """Whether it had been used or not; closing again is fine."""
    for is_used in (False, True):
        client, async_client = Client(silent.target), AsyncClient(silent.target)
        if is_used:
            await asyncio.to_thread(call, client, "status")
            await call_all_async(async_client, {"status"})
        client.close()
        await async_client.close()
        assert_all_end(await asyncio.to_thread(call_all, client, CALLS), CALLS, "ClientClosedError")
        assert_all_end(await call_all_async(async_client, ASYNC_CALLS), ASYNC_CALLS, "ClientClosedError")


async def test_closing_ends_the_calls_under_way_and_says_so(silent: SilentDaemon) -> None:
    """In each of the threads and tasks that wait, whatever their own timeouts are; the daemon is told."""
    names = CALLS - {"close"}
    client = Client(silent.target, timeouts=timeouts(LONG_S))
    calling = asyncio.create_task(asyncio.to_thread(call_all, client, names, LONG_S))
    await until(lambda: len(silent.calls) == len(names))
    began_at = time.monotonic()
    await asyncio.to_thread(client.close)
    outcomes = await asyncio.wait_for(calling, STEP_S)
    assert {name: each.ended for name, each in outcomes.items()} == dict.fromkeys(names, "ClientClosedError")
    assert time.monotonic() - began_at < SLACK_S
    await until(lambda: silent.num_ended == len(names))

    names = ASYNC_CALLS - {"close"}
    async_client = AsyncClient(silent.target, timeouts=timeouts(LONG_S))
    async_calling = asyncio.create_task(call_all_async(async_client, names, LONG_S))
    silent.calls.clear()
    await until(lambda: len(silent.calls) == len(names))
    await async_client.close()
    outcomes = await asyncio.wait_for(async_calling, STEP_S)
    assert {name: each.ended for name, each in outcomes.items()} == dict.fromkeys(names, "ClientClosedError")


async def test_closing_while_others_go_on_calling_ends_them_all(silent: SilentDaemon) -> None:
    """Calls that begin in the moment of closing are no exception."""
    for _ in range(20):
        client = Client(silent.target, timeouts=timeouts(LONG_S))
        ended: list[type] = []

        def keep_calling(client: Client = client, ended: list[type] = ended) -> None:
            while True:
                try:
                    client.status(timeout_s=0.001)
                except DeadlineError:
                    continue
                except BaseException as error:
                    ended.append(type(error))
                    return

        threads = [threading.Thread(target=keep_calling, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(client.close)
        for thread in threads:
            await asyncio.to_thread(thread.join, 10)
        assert ended == [ClientClosedError] * 4


async def test_calls_on_the_clients_own_loop_say_so(silent: SilentDaemon) -> None:
    """The loop reads a mapping of weights: what that calls would wait for itself. Closing there does not wait."""
    outcomes: dict[str, Outcome] = {}
    client = Client(silent.target, timeouts=timeouts())
    names = CALLS - {"close"}

    def meddle() -> None:
        outcomes.update({name: call(client, name) for name in names})

    with pytest.raises(DeadlineError):
        await asyncio.to_thread(client.push_weights, MeddlingWeights(meddle), version=1)
    assert_all_end(outcomes, names, "ClientMisuseError")
    with pytest.raises(ClientClosedError):
        await asyncio.to_thread(client.push_weights, MeddlingWeights(client.close), version=1)
    client.close()


async def test_an_async_client_says_that_it_belongs_to_another_loop(silent: SilentDaemon) -> None:
    """Also when that loop has ended, as with two times asyncio.run; closing it is then fine."""
    names = ASYNC_CALLS - {"close"}
    async_client = AsyncClient(silent.target, timeouts=timeouts())
    await call_all_async(async_client, {"status"})

    def on_another_loop(client: AsyncClient, names: set[str]) -> dict[str, Outcome]:
        return asyncio.run(call_all_async(client, names))

    outcomes = await asyncio.to_thread(on_another_loop, async_client, ASYNC_CALLS)
    assert {name: each.ended for name, each in outcomes.items()} == dict.fromkeys(ASYNC_CALLS, "ClientMisuseError")
    await async_client.close()

    async_client = AsyncClient(silent.target, timeouts=timeouts())
    await asyncio.to_thread(on_another_loop, async_client, {"status"})
    assert_all_end(await call_all_async(async_client, names), names, "ClientMisuseError")
    await async_client.close()


@pytest.mark.parametrize("where", ["this thread", "the loop's thread"])
async def test_calls_end_after_streams_were_dropped_and_collected(silent: SilentDaemon, where: str) -> None:
    """A begun stream ends its call wherever its finaliser runs, and waits for nobody."""
    names = CALLS - {"close"}

    def begin(client: Client) -> None:
        streams = [client.stream("x"), client.generate_as_completed(["x"]), client.watch_status()]
        for stream in streams:
            cycle: list[Any] = [stream]
            cycle.append(cycle)  # so that the collector has to find it

    def drop() -> dict[str, Outcome]:
        with Client(silent.target, timeouts=timeouts(LONG_S)) as client:
            begin(client)
            have_begun = until(lambda: len(silent.calls) == 3)  # one that is dropped before is not sent at all
            asyncio.run_coroutine_threadsafe(have_begun, loop).result()
            if where == "this thread":
                gc.collect()
            else:
                with pytest.raises(DeadlineError):
                    client.push_weights(MeddlingWeights(gc.collect), version=1, timeout_s=TIMEOUT_S)
            asyncio.run_coroutine_threadsafe(until(lambda: silent.num_ended == len(silent.calls)), loop).result()
            return call_all(client, names)

    gc.disable()
    loop = asyncio.get_running_loop()
    try:
        outcomes = await asyncio.to_thread(drop)
    finally:
        gc.enable()
    assert {name: each.ended for name, each in outcomes.items()} == dict.fromkeys(names, "DeadlineError")


async def test_a_client_that_is_dropped_ends_its_thread(silent: SilentDaemon) -> None:
    """And its calls; but not while one of its streams is read."""
    before = set(threading.enumerate())
    client = Client(silent.target)
    (thread,) = set(threading.enumerate()) - before
    stream = client.stream("x")
    seen = weakref.ref(client)
    del client
    await until(lambda: len(silent.calls) == 1)
    assert seen() is not None
    del stream
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()
    await until(lambda: silent.num_ended == 1)


# gRPC may hand an event to the loop that `asyncio.run` has closed, and log what comes of it. Nobody else can catch it.
OF_GRPC = re.compile(
    r"^Exception in callback PollerCompletionQueue\._handle_events.*?^RuntimeError: Event loop is closed\n",
    re.DOTALL | re.MULTILINE,
)


async def run_program(*arguments: str) -> list[dict[str, Outcome]]:
    """Its reports; it has to end by itself, with nothing of ours on stderr. A run without a report does not count, as
    Python promises no finaliser at its end, and runs few on a busy machine."""
    for _ in range(40):
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.unit.client.call_table", *arguments,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(START_S):
                output, errors = await program.communicate()
        except TimeoutError:
            program.kill()
            raise
        assert (program.returncode, OF_GRPC.sub("", errors.decode())) == (0, "")
        if output:
            break
    reports = [json.loads(line) for line in output.decode().splitlines()]
    return [{name: Outcome(*outcome) for name, outcome in report.items()} for report in reports]


@pytest.mark.slow
async def test_calls_in_a_forked_process_say_so(silent: SilentDaemon) -> None:
    """gRPC's threads are not there: every call would hang, with a client of before and with a new one. The process ends
    by itself."""
    client, new_client, async_client, new_async_client, closed = await run_program("fork", silent.target)
    for outcomes, names in (
        (client, CALLS), (new_client, CALLS), (async_client, ASYNC_CALLS), (new_async_client, ASYNC_CALLS),
    ):  # fmt: skip
        assert_all_end(outcomes, names - {"close"}, "ClientMisuseError")
    assert {name: each.ended for name, each in closed.items()} == {"close": "result", "close_async": "result"}


@pytest.mark.slow
async def test_program_ends_with_open_streams_and_later_calls_raise(silent: SilentDaemon) -> None:
    """Threads wait, streams lie in globals, and a finaliser calls on while the interpreter is taken apart."""
    (outcomes,) = await run_program("leave", silent.target)
    assert_all_end(outcomes, CALLS, "ClientClosedError")
