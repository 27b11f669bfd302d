"""Questions and answers between the daemon and a front end."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from genserve.errors import (
    DeadlineError,
    GenserveError,
    LoraNotFoundError,
    MessageTooLargeError,
    QueueFullError,
    UnavailableError,
)
from genserve.frontends import link as links
from genserve.frontends.link import Handler, Link, Message
from tests.support.patience import STEP_S, until
from tests.support.refusals import refuses


@asynccontextmanager
async def linked(handlers: Mapping[str, Handler]) -> AsyncIterator[tuple[Link, Link]]:
    """One end that asks, and one that answers."""
    ours, theirs = socket.socketpair()
    asking, answering = Link(ours, {}), Link(theirs, handlers)
    await asking.open()
    await answering.open()
    tasks = [asyncio.create_task(each.run()) for each in (asking, answering)]
    try:
        yield asking, answering
    finally:
        asking.close()
        answering.close()
        await asyncio.wait_for(asyncio.gather(*tasks), STEP_S)


async def test_answers_reach_their_callers_in_any_order() -> None:
    """A slow answer does not delay another one. Values and bytes cross unchanged."""
    release = asyncio.Event()

    async def slow(message: Message) -> Message:
        await release.wait()
        return Message({"slow": message.values["n"]})

    async def fast(message: Message) -> Message:
        release.set()
        return Message({"ids": [1, "ü", None]}, message.data * 2)

    async with linked({"slow": slow, "fast": fast}) as (asking, _):
        waiting = asyncio.create_task(asking.ask("slow", Message({"n": 7}), timeout_s=60))
        got = await asking.ask("fast", Message(data=b"\x00\xff"), timeout_s=60)
        assert (got.values, got.data) == ({"ids": [1, "ü", None]}, b"\x00\xff\x00\xff")
        assert (await waiting).values == {"slow": 7}


async def test_an_error_is_raised_where_it_was_asked() -> None:
    """With its class, message and metadata; one without a reason as a fault."""

    async def refuse(message: Message) -> Message:
        raise LoraNotFoundError("no adapter 'x'", metadata={"lora_name": "x"}, retry_after_s=2.0)

    async def fail(message: Message) -> Message:
        raise ZeroDivisionError

    async with linked({"refuse": refuse, "fail": fail}) as (asking, _):
        with refuses(LoraNotFoundError, says="no adapter 'x'") as raised:
            await asking.ask("refuse", timeout_s=60)
        assert (raised.value.metadata, raised.value.retry_after_s) == ({"lora_name": "x"}, 2.0)
        with refuses(GenserveError, says="ZeroDivisionError"):
            await asking.ask("fail", timeout_s=60)


async def test_unanswered_question_ends_at_its_deadline_and_harms_no_later_one() -> None:
    """The late answer is dropped."""
    release = asyncio.Event()

    async def late(message: Message) -> Message:
        await release.wait()
        return Message({"answer": "late"})

    async def next_one(message: Message) -> Message:
        return Message({"answer": "next"})

    async with linked({"late": late, "next": next_one}) as (asking, _):
        with refuses(DeadlineError, says="'late'"):
            await asking.ask("late", timeout_s=0.01)
        release.set()
        assert (await asking.ask("next", timeout_s=60)).values == {"answer": "next"}


async def test_end_of_the_other_side_raises_in_waiting_calls() -> None:
    """Also who asks after that."""
    reached = asyncio.Event()

    async def never(message: Message) -> Message:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with linked({"never": never}) as (asking, answering):
        waiting = asyncio.create_task(asking.ask("never", timeout_s=60))
        await reached.wait()
        answering.close()
        with pytest.raises(UnavailableError):
            await waiting
        with pytest.raises(UnavailableError):
            await asking.ask("never", timeout_s=60)


async def test_what_is_only_told_arrives_in_order_before_the_next_question() -> None:
    """The release of an adapter, and then its use."""
    seen: list[int] = []

    async def note(message: Message) -> Message:
        seen.append(message.values["n"])
        return Message()

    async with linked({"note": note}) as (asking, _):
        for number in range(5):
            asking.tell("note", Message({"n": number}))
        await asking.ask("note", Message({"n": 5}), timeout_s=60)
        assert seen == [0, 1, 2, 3, 4, 5]


async def test_an_end_that_asks_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asks is held in memory."""
    monkeypatch.setattr(links, "MAX_HANDLED", 3)

    async def never(message: Message) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with linked({"never": never}) as (asking, _):
        waiting = [asyncio.create_task(asking.ask("never", timeout_s=60)) for _ in range(4)]
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(each, UnavailableError)


@pytest.mark.parametrize("are_given_up", [False, True])
async def test_what_is_asked_for_clients_waits_and_is_not_cut_off(
    monkeypatch: pytest.MonkeyPatch, are_given_up: bool
) -> None:
    """Some thousand aborts at once. Those that nobody waits for any more count until they are answered. The
    daemon's own questions do not wait for them."""
    monkeypatch.setattr(links, "MAX_HANDLED", 4)
    monkeypatch.setattr(links, "MAX_FOR_CLIENTS", 2)
    num_begun, release = 0, asyncio.Event()

    async def slow(message: Message) -> Message:
        nonlocal num_begun
        num_begun += 1
        await release.wait()
        return message

    async def own(message: Message) -> Message:
        return Message({"own": 1})

    async with linked({"slow": slow, "own": own}) as (asking, _):

        def tasks() -> list["asyncio.Task[Message]"]:
            asked = (asking.ask_for_client("slow", Message({"n": n}), timeout_s=60) for n in range(10))
            return [asyncio.create_task(each) for each in asked]

        waiting = tasks()
        await until(lambda: num_begun >= 2)
        if are_given_up:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            with pytest.raises(QueueFullError):
                await asking.ask_for_client("slow", Message(), timeout_s=0.05)
            waiting = tasks()
        assert (await asking.ask("own", timeout_s=60)).values == {"own": 1}
        assert num_begun == 2
        release.set()
        assert [answer.values for answer in await asyncio.gather(*waiting)] == [{"n": n} for n in range(10)]


async def test_what_waits_to_be_asked_learns_that_the_other_end_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does what is too large to be asked: it takes no place."""
    monkeypatch.setattr(links, "MAX_FOR_CLIENTS", 2)
    monkeypatch.setattr(links, "MAX_JSON_BYTES", 1000)

    async def never(message: Message) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with linked({"never": never}) as (asking, answering):
        for _ in range(3):
            with pytest.raises(MessageTooLargeError):
                await asking.ask_for_client("never", Message({"text": "x" * 1000}), timeout_s=60)
        waiting = [asyncio.create_task(asking.ask_for_client("never", Message(), timeout_s=60)) for _ in range(10)]
        await asyncio.sleep(0)
        answering.close()
        for each in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(each, UnavailableError)


async def test_what_is_too_large_is_refused_where_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question or an answer; the link works on."""
    monkeypatch.setattr(links, "MAX_JSON_BYTES", 1000)

    async def repeat(message: Message) -> Message:
        return Message({"text": message.values["n"] * "x"})

    async with linked({"repeat": repeat}) as (asking, _):
        with pytest.raises(MessageTooLargeError):
            await asking.ask("repeat", Message({"text": "x" * 1000}), timeout_s=60)
        with pytest.raises(MessageTooLargeError):
            await asking.ask("repeat", Message({"n": 1000}), timeout_s=60)
        assert (await asking.ask("repeat", Message({"n": 3}), timeout_s=60)).values == {"text": "xxx"}
