"""How long every call may take: what the daemon is told, and how long a thread waits. One table has all calls."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

from genserve.client import AsyncClient, Client, Timeouts
from genserve.client.sync_client import blocking, blocking_context, blocking_stream
from genserve.transport.connection import UNSET, Timeout, Unset
from genserve.transport.loop_thread import LoopThread
from genserve.transport.timeouts import default_timeout_s
from tests.support.patience import until
from tests.support.silent_daemon import Asked, silent_daemon
from tests.unit.client.call_table import call, call_async, public_calls

TIMEOUTS: Final = Timeouts(control_s=31, generate_s=41, push_s=51, pause_slack_s=5, undo_slack_s=7)
GIVEN_S: Final = 20.0
_PAUSES: Final = ("pause", "paused", "sleep", "load_lora")
_TRANSFERS: Final = {"init_weight_transfer": 300, "start_weight_update": 60, "update_weights": 300}
DEFAULTS_S: Final[dict[str, float | None]] = {
    **dict.fromkeys(
        ("generate", "generate_many", "generate_as_completed", "stream", "stream_many"), TIMEOUTS.generate_s
    ),
    **dict.fromkeys(("push_weights", "push_lora", "load_weights", "commit_push", "pull_weights"), TIMEOUTS.push_s),
    **dict.fromkeys(_PAUSES, 60),
    **_TRANSFERS,
    "finish_weight_update": 300,
    "wake_up": 300,
    "wait_ready": 600,
    "watch_status": None,
    "watch_replicas": None,
    "drain_replica": 300,
}
"""By the method's name; the others have the time of control calls."""
SLACK_S: Final = {
    **dict.fromkeys(_PAUSES, TIMEOUTS.pause_slack_s),
    **dict.fromkeys((*_TRANSFERS, "finish_weight_update"), TIMEOUTS.undo_slack_s),
}
"""The daemon gives up first and says why; the call ends so much later."""
EXPLAINS_S: Final = 5.0
"""How much longer the streams of a push are open than the push may take, so that what is missing can be asked for."""
LATE_S: Final = 5.0
"""How much longer a thread waits for the loop than the loop for the daemon."""


def may_take_s(name: str, timeout_s: Timeout) -> float | None:
    """How long a call may take in all."""
    limit_s = DEFAULTS_S.get(name, TIMEOUTS.control_s) if isinstance(timeout_s, Unset) else timeout_s
    return None if limit_s is None else max(limit_s, 0.0) + SLACK_S.get(name, 0.0)


def deadline_s(name: str, timeout_s: Timeout) -> float | None:
    """What the daemon is told of it."""
    limit_s = may_take_s(name, timeout_s)
    if limit_s is None or name == "wait_ready":  # which watches as often as it has to
        return None
    return limit_s + EXPLAINS_S if name in ("push_weights", "push_lora") else limit_s


def has_no_limit(name: str) -> bool:
    """Whether the caller may ask for as much time as it takes."""
    return name not in SLACK_S and name not in ("wake_up", "wait_ready")


async def asked(names: set[str], timeout_s: Timeout, timeouts: Timeouts = TIMEOUTS) -> dict[str, Asked]:
    """What comes with each of these calls, made by a client of its own that sends the name along."""
    async with silent_daemon() as daemon, AsyncExitStack() as stack:
        calls = []
        for name in names:
            settings = {"metadata": {"x-call": name}, "token": "t", "timeouts": timeouts}
            client = await stack.enter_async_context(AsyncClient(daemon.target, **settings))  # type: ignore[arg-type]
            calls.append(asyncio.create_task(call_async(client, name, timeout_s)))
        await until(lambda: len(daemon.asked) >= len(names))
        await stack.aclose()
        await asyncio.gather(*calls)
        return {str(each.metadata.get("x-call")): each for each in daemon.asked}


async def assert_told(expected: dict[str, float | None], timeout_s: Timeout, timeouts: Timeouts = TIMEOUTS) -> None:
    """The daemon gets these deadlines, to the second. A call that took so long to arrive is made again."""
    wrong: dict[str, float | None] = expected
    for _ in range(6):
        seen = await asked(set(wrong), timeout_s, timeouts)
        assert {name: each.metadata.get("authorization") for name, each in seen.items()} == dict.fromkeys(
            wrong, "Bearer t"
        )
        wrong = {name: expected[name] for name, each in seen.items() if not _is_about(each.remaining_s, expected[name])}
        if not wrong:
            return
    assert {name: seen[name].remaining_s for name in wrong} == wrong


def _is_about(remaining_s: float | None, expected_s: float | None) -> bool:
    if remaining_s is None or expected_s is None:
        return remaining_s is expected_s
    return expected_s - 0.9 < remaining_s < expected_s + 0.5  # gRPC rounds it up


@pytest.mark.parametrize("timeout_s", [UNSET, GIVEN_S, None])
async def test_every_call_sends_its_deadline_token_and_metadata(timeout_s: Timeout) -> None:
    """The default of the call, or what is given, and the slack of those that the daemon ends itself. Token and metadata
    come with each."""
    names = public_calls(AsyncClient) - {"close"}
    expected = {name: deadline_s(name, timeout_s) for name in names if timeout_s is not None or has_no_limit(name)}
    await assert_told(expected, timeout_s)


async def test_without_settings_a_call_has_half_a_minute_and_what_moves_data_ten() -> None:
    """And the daemon ten seconds to answer after a pause, a minute to undo an update."""
    expected = {"status": 30.0, "stream": 600.0, "commit_push": 600.0, "pause": 70.0, "update_weights": 360.0}
    await assert_told(dict(expected), UNSET, Timeouts())


async def test_default_deadline_of_every_call_is_in_its_file() -> None:
    """Whose watches have none. The streams of a push are open a little longer."""
    names = public_calls(AsyncClient) - {"close", "wait_ready"}
    expected = {}
    for name, each in (await asked(names, UNSET, Timeouts())).items():
        _, service, method = each.method.split("/")
        timeout_s = default_timeout_s(service.removeprefix("genserve.v1."), method)
        expected[name] = timeout_s if timeout_s is None or method != "PushWeights" else timeout_s + EXPLAINS_S
    await assert_told(expected, UNSET, Timeouts())


async def test_a_call_may_ask_for_more_than_its_default() -> None:
    """For gRPC a timeout of its service config would be the most that a call can have."""
    await assert_told({"status": 4000.0, "stream": 4000.0}, 4000.0, Timeouts())


def waited_s(
    client: Client, names: set[str], timeout_s: Timeout, monkeypatch: pytest.MonkeyPatch
) -> dict[str, float | None]:
    """How long a thread would wait for each of these calls, none of which is made."""
    limits: dict[str, float | None] = {}

    def run(_: LoopThread, coroutine: Coroutine[Any, Any, Any], limit_s: float | None, mailbox: Any = None) -> Any:
        coroutine.close()
        limits[name] = limit_s
        raise ZeroDivisionError

    monkeypatch.setattr(LoopThread, "run", run)
    for name in names:
        assert call(client, name, timeout_s).ended == "ZeroDivisionError"
    return limits


@pytest.mark.parametrize("timeout_s", [UNSET, GIVEN_S, None, -GIVEN_S])
def test_a_thread_waits_a_little_longer_than_its_call_may_take(
    timeout_s: Timeout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call ends by itself, unless code of the caller blocks the loop."""
    names = {name for name in public_calls(Client) - {"close"} if timeout_s is not None or has_no_limit(name)}
    with Client("127.0.0.1:1", timeouts=TIMEOUTS) as client:
        limits = waited_s(client, names, timeout_s, monkeypatch)
    may_take = {name: may_take_s(name, timeout_s) for name in limits}
    assert limits == {name: None if limit_s is None else limit_s + LATE_S for name, limit_s in may_take.items()}


def test_a_blocking_call_is_declared_by_its_method_its_time_and_its_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever they are, it is that method with its documentation."""

    class Declared(Client):
        commit_push = blocking(AsyncClient.commit_push, "generate_s", "undo_slack_s")
        stream = blocking_stream(AsyncClient.stream, "push_s")
        paused = blocking_context(AsyncClient.paused, "control_s", "undo_slack_s")
        status = blocking(AsyncClient.status)
        watch_status = blocking_stream(AsyncClient.watch_status)
        wake_up = blocking(AsyncClient.wake_up)

    names = {"commit_push", "stream", "paused", "status", "watch_status", "wake_up"}
    for name in names:
        documentation = getattr(AsyncClient, name).__doc__.replace("`async with`", "`with`")
        assert getattr(Declared, name).__doc__ == documentation
    with Declared("127.0.0.1:1", timeouts=TIMEOUTS) as client:
        assert waited_s(client, names, UNSET, monkeypatch) == {
            "commit_push": 41 + 7 + LATE_S, "stream": 51 + LATE_S, "paused": 60 + 7 + LATE_S, "status": 31 + LATE_S,
            "watch_status": None, "wake_up": 300 + LATE_S,
        }  # fmt: skip
