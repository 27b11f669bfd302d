"""What a client is told whose push was applied, and whose answer was lost on the way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from genserve.client import AsyncClient, PushResult
from genserve.errors import PushConflictError, PushRolledBackError
from genserve.weights.push.stream import PushStream
from genserve.weights.push.types import PushHeader
from tests.rpc.served import weights
from tests.support.breakable_link import BreakableLink
from tests.support.patience import until
from tests.support.refusals import refuses
from tests.support.scripted_daemon import Daemon
from tests.support.scripted_engine import Gate


def is_freed(daemon: Daemon) -> bool:
    """Whether the daemon knows more of the push than when it answered."""
    applied = daemon.registry.report("p1").applied
    return applied is not None and applied.discard_s is not None


@asynccontextmanager
async def lost_answer(daemon: Daemon, **options: Any) -> AsyncIterator["asyncio.Task[PushResult]"]:
    """A push whose answer is on its way, and the link breaks at the end of the block."""
    committing = daemon.engine.gates["commit_weights"] = Gate()
    async with BreakableLink(daemon.address) as link, AsyncClient(link.address) as client:
        push = asyncio.create_task(client.push_weights(weights(1), version=1, push_id="p1", **options))
        await committing.reached.wait()
        link.silence()
        committing.open.set()
        await until(lambda: is_freed(daemon))
        link.cut()
        yield push
        link.let_go()
        await asyncio.wait({push})


async def test_repeat_returns_the_lost_answer_and_not_later_knowledge(daemon: Daemon) -> None:
    """So a trainer gets the same answer as whoever repeats the push."""
    async with lost_answer(daemon, timeout_s=30.0) as push:
        pass
    async with AsyncClient(daemon.address) as client:
        known = (await client.get_push("p1")).applied
        again = await client.push_weights(weights(1), version=1, push_id="p1")
    assert known is not None and known.discard_s is not None
    assert push.result().applied == again.applied
    assert again.applied is not None and again.applied.discard_s is None
    assert (push.result().push, push.result().state) == (again.push, again.state)


async def test_a_push_that_is_applied_does_not_fail_for_want_of_its_answer(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What GetPush says has to do then."""
    repeats: list[PushHeader] = []

    async def refuse(header: PushHeader) -> PushStream:
        repeats.append(header)
        raise PushConflictError("no repeat is answered")

    async with lost_answer(daemon, timeout_s=30.0) as push:
        monkeypatch.setattr(daemon.registry, "open", refuse)
    async with AsyncClient(daemon.address) as client:
        assert push.result().applied == (await client.get_push("p1")).applied
    assert len(repeats) == 1


async def test_a_push_that_a_router_has_undone_fails(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """GetPush was answered by a replica that had applied it alone."""

    async def undone(header: PushHeader) -> PushStream:
        raise PushRolledBackError("the fleet does not serve it")

    async with lost_answer(daemon, timeout_s=30.0) as push:
        monkeypatch.setattr(daemon.registry, "open", undone)
    with refuses(PushRolledBackError):
        push.result()
