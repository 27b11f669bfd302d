"""When a process is started again, and when it is given up: the rule, and what people are told."""

import asyncio
import os
import re
import sys
from collections.abc import Sequence

import pytest

from genserve.frontends.frontend import FrontEnd
from genserve.frontends.questions import FrontendSettings
from genserve.frontends.template import Started
from genserve.ingest.processes import Receiver
from genserve.ingest.relay import IngestSettings
from genserve.process import supervisor
from genserve.process.supervisor import Deaths, Supervised, start_all
from tests.support.clocks import leaping_clock
from tests.support.patience import turns, until
from tests.support.said import Said
from tests.unit.frontends.scripted_seat import Seat


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Said:
    return Said(capfd)


class Scripted(Supervised):
    """A process with these lives, in seconds; None: it cannot be started; text: why it did not start. After the last
    one it stays."""

    def __init__(self, lives_s: Sequence[float | str | None]) -> None:
        self._lives_s = list(lives_s)
        self.num_started = 0

    def __str__(self) -> str:
        return "frog"

    async def start(self) -> None:
        """A life."""
        self.num_started += 1
        if self._lives_s and not isinstance(self._lives_s[0], float):
            why = self._lives_s.pop(0)
            raise OSError("no pond") if why is None else RuntimeError(why)

    async def ended(self) -> str:
        """It dies of the life's end."""
        life_s = self._lives_s.pop(0) if self._lives_s else 1e9
        assert isinstance(life_s, float)
        clock = asyncio.get_running_loop().time
        until_s = clock() + life_s
        while (left_s := until_s - clock()) > 0:
            await asyncio.sleep(left_s)
        return "it was eaten"


def waits(deaths: Deaths, *lives_s: float) -> list[float]:
    """Those after lives of this length, each of which begins when the wait before is over."""
    now_s, found = 100.0, []
    for life_s in lives_s:
        now_s += life_s
        found.append(deaths.add(now_s, life_s))
        now_s += found[-1]
    return found


def test_each_wait_is_twice_the_one_before_up_to_a_limit() -> None:
    """From half a second to half a minute."""
    assert waits(Deaths(), *[0.0] * 9) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_long_life_is_followed_by_a_short_wait() -> None:
    """A minute is long; the waits grow again from there."""
    assert waits(Deaths(), 0.0, 59.9, 60.0, 0.0, 0.0) == [0.5, 1.0, 0.5, 1.0, 2.0]


def test_the_fifth_death_in_a_row_is_one_too_many() -> None:
    """However long the process served in between, if it never was a minute."""
    deaths = Deaths()
    waits(deaths, 59.0, 59.0, 59.0, 59.0)
    assert not deaths.are_too_many
    waits(deaths, 59.0)
    assert deaths.are_too_many


def test_deaths_before_a_long_life_are_forgotten() -> None:
    """The count and the time begin with the death that ends it."""
    deaths = Deaths()
    waits(deaths, 0.0, 0.0, 0.0, 0.0, 60.0)
    assert (deaths.number, deaths.within_s, deaths.are_too_many) == (1, 0.0, False)
    waits(deaths, 0.0)
    assert deaths.number == 2


async def test_a_process_that_ends_too_often_is_given_up(said: Said) -> None:
    """People are told what has ended, how, how often and in what time. A start that fails counts too."""
    frog = Scripted([1.0, None, 2.0, "it did not hatch", None])
    with leaping_clock():
        await frog.run(serves=True)
    assert (frog.is_down, frog.num_started) == (True, 4)
    assert said.lines == [
        "frog: it was eaten; it is started again in 0.5 s",
        "frog: it cannot be started: no pond; it is started again in 1 s",
        "frog: it was eaten; it is started again in 2 s",
        "frog: it did not hatch; it is started again in 4 s",
        "frog: it cannot be started: no pond, 5 times within 10 s; it stays down",
    ]


async def test_a_process_that_serves_in_between_is_never_given_up(said: Said) -> None:
    """A minute is enough."""
    frog = Scripted([60.0] * 20)
    with leaping_clock():
        running = asyncio.create_task(frog.run())
        async with asyncio.timeout(3600):
            while frog.num_started < 21:
                await asyncio.sleep(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not frog.is_down
    assert said.lines == ["frog: it was eaten; it is started again in 0.5 s"] * 20


async def test_a_kind_may_be_given_up_earlier(said: Said) -> None:
    """One death has no count. What is given up is not waited for."""

    class Hopeless(Scripted):
        def is_given_up(self, deaths: Deaths) -> bool:
            return True

    await Hopeless([0.0]).run()
    assert said.lines == ["frog: it was eaten; it stays down"]


async def test_a_process_that_is_to_end_is_not_started_again(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not died either, even if one death were too many: nobody is told."""
    monkeypatch.setattr(supervisor, "MAX_DEATHS", 1)
    frog = Scripted([5.0])
    with leaping_clock():
        running = asyncio.create_task(frog.run())
        await turns()
        frog.is_wanted = False
        await running
    assert (frog.is_down, frog.num_started, said.lines) == (False, 1, [])


async def test_a_process_may_be_to_end_while_none_runs(said: Said) -> None:
    """The next start does not come."""
    frog = Scripted([0.0])
    with leaping_clock():
        running = asyncio.create_task(frog.run())
        await until(lambda: said.lines)
        frog.is_wanted = False
        await running
    assert (frog.is_down, frog.num_started) == (False, 1)
    assert said.lines == ["frog: it was eaten; it is started again in 0.5 s"]


async def test_what_does_not_start_at_first_is_named() -> None:
    """When all others have started or failed: nothing goes on behind the error."""
    good, bad = Scripted([]), Scripted([None])
    with pytest.raises(RuntimeError, match=r"^frog: it cannot be started: no pond$"):
        await start_all([bad, good])
    assert good.num_started == 1


class NoStarter:
    """A machine that has no room for a front end."""

    async def start(self, settings: FrontendSettings) -> Started:
        """It cannot."""
        raise OSError("no room")

    async def how_ended(self, pid: int) -> str:
        """None has."""
        raise AssertionError


async def test_all_kinds_are_counted_and_told_alike(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """A front end that no machine starts, and a receiving process whose interpreter is gone."""
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    front_end = FrontEnd(NoStarter(), Seat(), FrontendSettings(os.getpid(), 0, -1, (), 0), None)
    receiver = Receiver(IngestSettings("127.0.0.1", 0, "", ()))
    for kind, why in ((front_end, "no room"), (receiver, "[Errno 2] No such file or directory: '/no/such/python'")):
        with leaping_clock():
            await kind.run()
        *again, last = [line for line in said.lines if line.startswith(f"{kind}: ")]
        told = f"{kind}: it cannot be started: {why}"
        assert again == [f"{told}; it is started again in {wait_s} s" for wait_s in (0.5, 1, 2, 4)]
        assert re.fullmatch(rf"{re.escape(told)}, 5 times within [78] s; it stays down", last)


async def test_a_fault_of_ours_is_no_death() -> None:
    """It is raised."""

    class Broken(Scripted):
        async def ended(self) -> str:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await Broken([]).run()
