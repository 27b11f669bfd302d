"""When an engine that does not answer is given up, and when it is only slow."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import pytest

from genserve.engine.vllm.activity import Activity, Processes
from genserve.engine.vllm.heartbeat import Heartbeat, HeartbeatLimits, hopeless
from genserve.engine.vllm.liveness import Liveness
from genserve.errors import DeadlineError, EngineDeadError
from tests.support.clocks import leaping_clock
from tests.support.patience import until

IDLE = Activity(cpu_s=10.0, works=False, stopped=False, steps=100)
WORKS = replace(IDLE, works=True)
LIMITS = HeartbeatLimits(timeout_s=10.0, step_s=60.0)
PATIENT = replace(LIMITS, step_s=600.0)


@dataclass
class Pinged:
    """An engine that answers pings while `answers` is set, and works while `works` is."""

    liveness: Liveness = field(default_factory=Liveness)
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    told: list[bool] = field(default_factory=list)
    num_pings: int = 0
    num_pending: int = 0
    works: bool = False
    seen: Activity = IDLE

    async def ping(self, workers: bool) -> None:
        self.num_pings += 1
        assert self.num_pending == 0, "one at a time"
        self.num_pending += 1
        try:
            await self.answers.wait()
        finally:
            self.num_pending -= 1

    def any_stopped(self) -> bool:
        return self.seen.stopped

    def activity(self) -> Activity:
        self.seen = replace(self.seen, cpu_s=self.seen.cpu_s + self.works)
        return self.seen


@pytest.fixture
async def no_time() -> AsyncIterator[None]:
    """Time passes while nothing else is to be done."""
    with leaping_clock():
        yield


async def later(seconds: float) -> None:
    """Lets them pass, and everything happen that is due."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_later(seconds, over.set_result, None)
    await over


def heartbeat_of(engine: Pinged, limits: HeartbeatLimits) -> Heartbeat:
    """By the clock of the running event loop."""
    return Heartbeat(engine.liveness, engine.ping, engine, limits, engine.told.append, asyncio.get_running_loop().time)


@pytest.fixture
async def pinged(no_time: None) -> AsyncIterator[Pinged]:
    engine = Pinged()
    engine.answers.set()
    beating = asyncio.create_task(heartbeat_of(engine, PATIENT).run())
    yield engine
    beating.cancel()
    await asyncio.wait({beating})


async def test_an_engine_that_answers_is_left_alone(pinged: Pinged) -> None:
    """Asked again and again."""
    await until(lambda: pinged.num_pings > 5)
    assert pinged.told == []


async def test_the_age_is_the_time_since_the_last_answer() -> None:
    """Not since the last question."""
    now = 10.0
    engine = Pinged()
    engine.answers.set()
    heartbeat = Heartbeat(engine.liveness, engine.ping, engine, LIMITS, engine.told.append, lambda: now)
    now = 13.0
    assert heartbeat.age_s == 3.0
    beating = asyncio.create_task(heartbeat.run())
    try:
        await until(lambda: not heartbeat.age_s)
        engine.answers.clear()
        asked = engine.num_pings
        now = 14.0
        await until(lambda: engine.num_pings > asked)
        assert heartbeat.age_s == 1.0
    finally:
        beating.cancel()
        await asyncio.wait({beating})


async def test_idle_engine_that_does_not_answer_is_given_up_on_time(pinged: Pinged) -> None:
    """Health first, then every call ends."""
    pinged.answers.clear()
    began_s = asyncio.get_running_loop().time()
    await pinged.liveness.wait_dead()
    assert asyncio.get_running_loop().time() - began_s < PATIENT.step_s / 2
    assert pinged.told == [False]
    assert "its processes use no CPU" in pinged.liveness.cause_of_death


async def test_a_death_that_somebody_else_has_found_ends_it_at_once(
    no_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between two pings: a daemon that is told to stop meanwhile has to know why its engine is gone."""
    monkeypatch.setattr("genserve.engine.vllm.heartbeat.INTERVAL_S", 600.0)
    engine = Pinged()
    engine.answers.set()
    limits = replace(LIMITS, timeout_s=3000.0)
    beating = asyncio.create_task(heartbeat_of(engine, limits).run())
    await until(lambda: engine.num_pings > 0 and engine.num_pending == 0)
    began_s = asyncio.get_running_loop().time()
    engine.liveness.declare_dead("a worker failed")
    await beating
    assert asyncio.get_running_loop().time() == began_s


async def test_an_engine_in_a_long_step_is_not_serving_until_it_answers(pinged: Pinged) -> None:
    """Its processes work: it is no more than late. The ping is not sent again meanwhile."""
    pinged.works = True
    pinged.answers.clear()
    await until(lambda: bool(pinged.told))
    await later(LIMITS.timeout_s)
    assert (pinged.told, pinged.num_pending) == ([False], 1)
    pinged.answers.set()
    await until(lambda: len(pinged.told) > 1)
    await later(LIMITS.timeout_s)
    assert pinged.told == [False, True]
    assert not pinged.liveness.dead


async def test_a_step_without_an_end_is_given_up(no_time: None) -> None:
    """At the limit of a step, though its processes work."""
    engine = Pinged(works=True)
    await heartbeat_of(engine, LIMITS).run()
    assert "no step may take that long" in engine.liveness.cause_of_death


class Unseen(Pinged):
    """There is no file descriptor left to look at its processes with."""

    def any_stopped(self) -> bool:
        raise OSError(errno.EMFILE, "Too many open files")

    def activity(self) -> Activity:
        raise OSError(errno.EMFILE, "Too many open files")


async def test_engine_with_unreadable_processes_is_judged_by_its_answers(no_time: None) -> None:
    """Clients that take all descriptors must not end it. If it does not answer, it has the time of a step."""
    engine = Unseen()
    engine.answers.set()
    beating = asyncio.create_task(heartbeat_of(engine, LIMITS).run())
    await until(lambda: engine.num_pings >= 3)
    assert not beating.done() and engine.told == []
    engine.answers.clear()
    await engine.liveness.wait_dead()
    assert "no step may take that long" in engine.liveness.cause_of_death
    await beating


async def test_a_call_that_takes_long_is_no_silence(pinged: Pinged) -> None:
    """It has a deadline of its own; when that has passed, silence begins to count."""
    calling = asyncio.create_task(
        pinged.liveness.call(asyncio.Event().wait(), what="commit", timeout_s=3 * LIMITS.timeout_s)
    )
    await asyncio.sleep(0)
    pinged.answers.clear()
    with pytest.raises(DeadlineError):
        await calling
    assert pinged.told == []
    assert not pinged.liveness.dead
    await pinged.liveness.wait_dead()
    assert pinged.told == [False]


async def test_a_call_that_was_made_after_the_ping_is_no_excuse(pinged: Pinged) -> None:
    """The engine would have answered the ping before it: clients that call on do not keep a dead engine alive."""
    pinged.answers.clear()
    await until(lambda: pinged.num_pending == 1)
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(EngineDeadError):
        await pinged.liveness.call(asyncio.Event().wait(), what="digests", timeout_s=60.0)
    assert asyncio.get_running_loop().time() - began_s < PATIENT.step_s / 2


async def test_a_stopped_worker_is_found_though_nobody_asks_it(pinged: Pinged) -> None:
    """EngineCore answers; one that goes on in time is as good as before."""
    pinged.seen = replace(IDLE, stopped=True)
    await later(LIMITS.timeout_s / 2)
    pinged.seen = IDLE
    await later(LIMITS.timeout_s)
    assert pinged.told == []
    pinged.seen = replace(IDLE, stopped=True)
    await pinged.liveness.wait_dead()
    assert pinged.told == [False]


async def test_a_worker_that_breaks_off_ends_the_heartbeat(pinged: Pinged) -> None:
    """As any death does."""
    pinged.answers.clear()
    pinged.liveness.declare_dead("a worker failed")
    await later(2 * LIMITS.timeout_s)
    assert pinged.told == []


@pytest.mark.parametrize(
    ("looks", "num_steps", "says"),
    [
        ([IDLE] * 10, 0, "use no CPU"),
        ([IDLE], 0, None),
        ([WORKS] * 10, 0, None),
        ([WORKS, WORKS, *[IDLE] * 8], 0, None),
        ([WORKS, *[IDLE] * 9], 0, "use no CPU"),
        ([IDLE, replace(IDLE, cpu_s=IDLE.cpu_s + 2.0)], 0, None),
        ([IDLE, replace(IDLE, cpu_s=IDLE.cpu_s + 0.4)], 0, "use no CPU"),
        ([IDLE, replace(WORKS, cpu_s=IDLE.cpu_s + 2.0, stopped=True)], 0, "is stopped"),
        ([IDLE, replace(IDLE, cpu_s=IDLE.cpu_s + 2.0)], 2, None),
        ([IDLE, replace(IDLE, cpu_s=IDLE.cpu_s + 2.0)], 16, "does not read calls"),
    ],
)
def test_what_processes_do_tells_whether_an_answer_may_come(
    looks: list[Activity], num_steps: int, says: str | None
) -> None:
    """A long step works and ends none; a few steps may have been on their way. An engine at work may seem idle in most
    looks, and an idle one that polls something may seem at work in one."""
    reason = hopeless(looks, 2.5 * (len(looks) > 1), num_steps)
    assert reason is None if says is None else says in str(reason)


def test_processes_are_observed_with_their_children() -> None:
    """CPU time and stops of a child count: workers are children of EngineCore."""
    burn = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(flush=True)\\nwhile True: pass'])"
    with subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        processes = Processes([parent.pid], lambda: 7)
        try:
            before = processes.activity()
            while processes.activity().cpu_s < before.cpu_s + 0.1:
                pass
            assert (before.stopped, before.steps) == (False, 7)
            assert not processes.any_stopped()
            with open(f"/proc/{parent.pid}/task/{parent.pid}/children") as children:
                child = int(children.read())
            os.kill(child, signal.SIGSTOP)
            while not (processes.any_stopped() and processes.activity().stopped):
                pass
            os.kill(child, signal.SIGKILL)
        finally:
            parent.kill()
    assert processes.activity() == Activity(0.0, False, False, 7)
    assert not processes.any_stopped()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "works", "cause"),
    [("while True: pass", True, "no step may take that long"), ("event.wait()", False, "use no CPU")],
)
async def test_starved_processes_count_as_busy_and_idle_ones_do_not(work: str, works: bool, cause: str) -> None:
    """A machine whose CPUs are taken by other programs. A worker prepares a version in a thread that is not its first
    one; the first one sleeps."""
    core = min(os.sched_getaffinity(0))
    worker = f"import os, threading; event = threading.Event(); os.sched_setaffinity(0, {{{core}}})\n"
    worker += "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"  # however nice the tests are themselves
    worker += f"def work():\n    {work}\nthreading.Thread(target=work).start(); print(flush=True); event.wait()"
    other = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    with ExitStack() as stack:
        processes = Processes([stack.enter_context(_running(worker)).pid], lambda: 0)
        await until(lambda: processes.activity().works is works)  # starved, it would take seconds to go to sleep
        for _ in range(2):
            stack.enter_context(_running(other))
        limits = HeartbeatLimits(1.0, step_s=3.0, idle_s=0.0)
        liveness, before = Liveness(), processes.activity()
        unanswered = Heartbeat(liveness, lambda _: asyncio.Event().wait(), processes, limits, lambda _: None)
        await asyncio.wait_for(unanswered.run(), 60)
        assert processes.activity().cpu_s - before.cpu_s < 0.2 * limits.timeout_s, "otherwise it tests nothing"
        assert cause in liveness.cause_of_death


@contextmanager
def _running(program: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A program that has written a line, until the end of the block."""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()
