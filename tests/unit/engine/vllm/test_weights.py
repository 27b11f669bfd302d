"""Preparing weights: which CPU time it leaves to requests."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from genserve.engine.types import ArenaRef
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.weights import LiveWeights
from genserve.engine.vllm.workers import Workers
from genserve.worker.contract.calls import Ack

ARENA = ArenaRef("/arena", 4, "p1")


class ScriptedCore:
    """vLLM's client of its engine, with one rank."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool | None]] = []
        self.was_asked = asyncio.Event()

    async def call_utility_all_async(self, name: str, method: str, *args: Any) -> list[list[dict[str, Any]]]:
        """As vLLM's."""
        wire = args[1][0]
        self.asked.append((method, wire.get("beside_requests")))
        self.was_asked.set()
        return [[Ack("tp0", wire["nonce"], "").to_wire()]]

    async def wait_asked(self) -> None:
        """Returns at the next call."""
        self.was_asked.clear()
        async with asyncio.timeout(10):
            await self.was_asked.wait()


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture
def busy() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def workers(core: ScriptedCore) -> AsyncIterator[Workers]:
    made = Workers(core, Liveness(lambda: None), 1)
    yield made
    made.close()


@pytest.fixture
def weights(workers: Workers, busy: asyncio.Event) -> LiveWeights:
    return LiveWeights(cast(Any, None), Liveness(lambda: None), workers, "", busy)


def report(workers: Workers) -> None:
    """That the rank has prepared."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(json.dumps(Ack("tp0", "n", "").to_wire()).encode(), workers.report_socket)


async def test_a_preparation_that_begins_while_requests_run_comes_after_them(
    weights: LiveWeights, workers: Workers, core: ScriptedCore, busy: asyncio.Event
) -> None:
    """From its beginning: nobody has to tell the workers later."""
    busy.set()
    preparing = asyncio.create_task(weights.prepare("n", ARENA, [], 10.0))
    await core.wait_asked()
    report(workers)
    await preparing
    assert core.asked == [("genserve_prepare", True)]


async def test_a_preparation_steps_back_when_the_first_request_comes(
    weights: LiveWeights, workers: Workers, core: ScriptedCore, busy: asyncio.Event
) -> None:
    """Once, on every rank."""
    preparing = asyncio.create_task(weights.prepare("n", ARENA, [], 10.0))
    await core.wait_asked()
    busy.set()
    await core.wait_asked()
    busy.clear()
    busy.set()
    report(workers)
    await preparing
    assert core.asked == [("genserve_prepare", False), ("genserve_step_back", None)]


async def test_nothing_waits_for_requests_after_a_preparation(
    weights: LiveWeights, workers: Workers, core: ScriptedCore, busy: asyncio.Event
) -> None:
    """A request that comes then has no effect on the workers."""
    before = asyncio.all_tasks()
    preparing = asyncio.create_task(weights.prepare("n", ARENA, [], 10.0))
    await core.wait_asked()
    report(workers)
    await preparing
    busy.set()
    async with asyncio.timeout(10):
        while others := asyncio.all_tasks() - before:
            await asyncio.wait(others)
    assert core.asked == [("genserve_prepare", False)]
