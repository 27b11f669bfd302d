"""Reports of workers, those that come by themselves and those that have to be asked for."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.workers import WorkerError, Workers
from genserve.errors import DeadlineError
from genserve.worker.contract.calls import Ack, Prepare, Progress
from tests.support.clocks import leaping_clock
from tests.support.patience import until

HERE, ELSEWHERE, NEXT_TO_IT = "tp0", "tp1", "tp2"
RANKS = (HERE, ELSEWHERE, NEXT_TO_IT)


@dataclass
class ScriptedCore:
    """vLLM's client of its engine: every rank acknowledges, and those in `done` are done when asked. `failed`: what
    went wrong there."""

    done: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    when_asked: Callable[[int], None] = lambda number: None

    async def call_utility_all_async(self, name: str, method: str, *args: Any) -> list[list[dict[str, Any]]]:
        """As vLLM's: answers of two data-parallel engines."""
        self.asked.append(method)
        nonce = args[1][0]["nonce"]
        if not method.endswith("ed"):
            answers: list[Any] = [Ack(rank, nonce, "") for rank in RANKS]
        else:
            self.when_asked(len(self.asked) - 1)
            answers = [
                Progress(rank, nonce, rank in self.done, self.failed.get(rank, ""), f"/{rank}") for rank in RANKS
            ]
        wire = [each.to_wire() for each in answers]
        return [wire[:1], wire[1:]]


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture
async def workers(core: ScriptedCore) -> AsyncIterator[Workers]:
    """Three ranks, two of them on another host."""
    made = Workers(core, Liveness(lambda: None), len(RANKS))
    made.other_hosts = {"there": [ELSEWHERE, NEXT_TO_IT]}
    yield made
    made.close()


def report(workers: Workers, rank: str, error: str = "") -> None:
    """As a worker on this host."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(json.dumps(Ack(rank, "n", error).to_wire()).encode(), workers.report_socket)


async def prepared(workers: Workers, timeout_s: float = 5.0) -> None:
    """A preparation."""
    await workers.prepare(Prepare("n", "", 0, [], {}), timeout_s=timeout_s)


async def nobody_asks() -> None:
    """Returns when no task is left that could; an error unless that is soon."""
    async with asyncio.timeout(30):
        while asking := [task for task in asyncio.all_tasks() if "_report_progress" in repr(task.get_coro())]:
            await asyncio.wait(asking)


async def test_ranks_elsewhere_are_asked_until_they_are_done(workers: Workers, core: ScriptedCore) -> None:
    """One after the other; the one here reports by itself."""
    steps = {1: {ELSEWHERE}, 3: {ELSEWHERE, NEXT_TO_IT}}
    core.when_asked = lambda number: core.done.update(steps.get(number, set()))
    preparing = asyncio.create_task(prepared(workers))
    await until(lambda: core.asked)
    report(workers, HERE)
    await preparing
    assert core.asked == ["genserve_prepare", *["genserve_prepared"] * 3]


async def test_one_that_fails_elsewhere_is_reported_at_once(workers: Workers, core: ScriptedCore) -> None:
    """Nobody waits for the others, and nobody is asked any more."""
    core.done, core.failed = {ELSEWHERE}, {ELSEWHERE: "no such tensor"}
    with pytest.raises(WorkerError, match="tp1: no such tensor"):
        await prepared(workers, timeout_s=60.0)
    await nobody_asks()


@pytest.mark.slow
async def test_one_that_is_never_done_is_not_waited_for(workers: Workers, core: ScriptedCore) -> None:
    """The deadline is the call's."""
    with leaping_clock():
        with pytest.raises(DeadlineError):
            await prepared(workers, timeout_s=600.0)
        await nobody_asks()


async def test_without_other_hosts_nobody_is_asked(workers: Workers, core: ScriptedCore) -> None:
    """Every question would take the engine's time."""
    workers.other_hosts = {}
    with leaping_clock():
        preparing = asyncio.create_task(prepared(workers, timeout_s=600.0))
        await asyncio.wait({preparing}, timeout=60.0)
        for rank in RANKS:
            report(workers, rank)
        await preparing
    assert core.asked == ["genserve_prepare"]


async def test_progress_tells_each_rank_once(workers: Workers, core: ScriptedCore) -> None:
    """With where it has the bytes; of those that were asked for alone."""
    core.done = set(RANKS)
    deadline = asyncio.get_running_loop().time() + 5.0
    found = [each async for each in workers.progress("genserve_fetched", "n", [NEXT_TO_IT], deadline)]
    assert [(each.rank, each.arena_path) for each in found] == [(NEXT_TO_IT, "/tp2")]
