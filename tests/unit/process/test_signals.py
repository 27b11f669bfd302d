"""The first signal drains, a second one exits; how long a drain may take; and how the end of a process is told."""

import asyncio
import os
import select
import signal
import subprocess
import sys

import pytest

from genserve.process.signals import Stopped, ending
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, turns

PROGRAM = """
import asyncio
from genserve.process.signals import stop_on_signals

async def main():
    with stop_on_signals(lambda name: print(name, flush=True), lambda: print("at once", flush=True)):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
ENDING = """
import signal, sys, uvloop
from genserve.process.signals import stop_on_signals

async def main():
    with stop_on_signals(print):
        pass

uvloop.run(main())
for number in (signal.SIGTERM,) * int(sys.argv[1]):
    signal.raise_signal(number)
sys.exit(3)
"""

STOP = """
from genserve.observe.notices import say

def stop(name):
    say(name)
    print(name, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_exits_at_once(number: signal.Signals) -> None:
    """Whatever is still being drained; the status says which signal it was."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"
        assert process.poll() is None
        process.send_signal(number)
        assert process.stdout.readline() == "at once\n"
        assert process.wait(30) == 128 + number


STARTER = """
import subprocess, sys, threading
from genserve.launcher.end_with_starter import ending_with_this_process

started = threading.Event()

def start():
    subprocess.Popen(ending_with_this_process([sys.executable, "-c", sys.argv[1]]))
    started.set()
    threading.Event().wait()

threading.Thread(target=start).start()
started.wait()
for _ in range(200):
    threading.Thread(target=threading.Event().wait).start()
threading.Event().wait()
"""
DRAINING = """
import asyncio
from genserve.process.signals import stop_on_signals

async def main():
    told = asyncio.Event()

    def stop(name):
        print(name, flush=True)
        told.set()

    with stop_on_signals(stop, lambda: print("at once", flush=True)):
        print("ready", flush=True)
        await told.wait()
        await asyncio.sleep(1.5)
        print("drained", flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_starter_that_is_killed_gives_one_order() -> None:
    """The kernel sends a signal for each of its threads that had the process as its child."""
    for _ in range(3):
        command = [sys.executable, "-c", STARTER, DRAINING]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
            assert starter.stdout is not None
            assert starter.stdout.readline() == "ready\n"
            starter.kill()
            assert starter.stdout.read() == "SIGTERM\ndrained\n"


@pytest.mark.slow
def test_an_order_may_be_repeated_after_the_end_of_a_starter() -> None:
    """It exits at once then."""
    waiting = f"import os; print(os.getpid(), flush=True)\n{PROGRAM}"
    with subprocess.Popen([sys.executable, "-c", STARTER, waiting], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        process = int(starter.stdout.readline())
        assert starter.stdout.readline() == "ready\n"
        starter.kill()
        assert starter.stdout.readline() == "SIGTERM\n"
        while not select.select([starter.stdout], [], [], 0.05)[0]:  # at first it is taken for the one before
            os.kill(process, signal.SIGTERM)
        assert starter.stdout.read() == "at once\n"


def test_a_signal_does_not_change_the_status_of_a_process_that_ends() -> None:
    """Who has started a daemon that fails tells it to stop: the status is that of the failure. A second signal ends it
    all the same."""
    for num_signals, status, told in ((1, 3, ""), (2, 128 + signal.SIGTERM, "genserve: second SIGTERM, exiting now\n")):
        command = [sys.executable, "-c", ENDING, str(num_signals)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (status, "", told)


def test_a_first_signal_counts_when_nobody_reads_stderr() -> None:
    """Who started the process may be gone, and with it the terminal: what it says has to be lost, and not the drain."""
    program = PROGRAM.replace("lambda name: print(name, flush=True)", "stop").replace(
        "async def main", f"{STOP}\nasync def main"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


def test_the_end_of_a_process_is_named_as_people_know_it() -> None:
    """A signal by its name, not by a negative number."""
    assert ending(0) == "ended with status 0"
    assert ending(3) == "ended with status 3"
    assert ending(-signal.SIGKILL) == "was ended by SIGKILL"
    assert ending(-(signal.SIGRTMIN + 1)) == f"was ended by signal {signal.SIGRTMIN + 1}"


async def test_a_signal_after_a_drain_leaves_the_time_of_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever sends it kills the process after that. What was to end is not cancelled."""
    stopped, ending_forever = Stopped(), asyncio.get_running_loop().create_future()
    stopped.stop("Drain", 3600)
    with advanced_clock() as clock:
        waiting = asyncio.create_task(stopped.wait_ended(ending_forever, 60))
        await clock.advance(600)
        stopped.stop("Drain")  # a repeat changes nothing
        await clock.advance(600)
        assert not waiting.done()
        stopped.signal("SIGTERM")
        await clock.advance(30)
        assert not waiting.done()
        await clock.advance(31)
        assert not await waiting and not ending_forever.done()
    assert capsys.readouterr().err == "genserve: a signal: 60 s at most from now; a second one exits at once\n"
    assert (stopped.cause, stopped.limit_s(30)) == ("Drain", 3600)


@pytest.mark.parametrize(("drain_timeout_s", "flag_s"), [(60, 3600), (None, 60)])
async def test_a_signal_never_gives_more_time(drain_timeout_s: float | None, flag_s: float) -> None:
    """Before what runs is waited for, or meanwhile."""
    for before in (True, False):
        stopped, ending_forever = Stopped(), asyncio.get_running_loop().create_future()
        stopped.stop("Drain", drain_timeout_s)
        if before:
            stopped.signal("SIGTERM")
        with advanced_clock() as clock:
            waiting = asyncio.create_task(stopped.wait_ended(ending_forever, flag_s))
            await turns()
            stopped.signal("SIGTERM")
            await clock.advance(61)
            assert not await asyncio.wait_for(waiting, STEP_S)


async def test_what_ends_in_time_is_not_waited_for_any_longer() -> None:
    """Whatever comes meanwhile."""
    stopped, ended = Stopped(), asyncio.get_running_loop().create_future()
    stopped.signal("SIGTERM")
    waiting = asyncio.create_task(stopped.wait_ended(ended, 3600))
    await turns()
    ended.set_result(None)
    assert await asyncio.wait_for(waiting, STEP_S)
