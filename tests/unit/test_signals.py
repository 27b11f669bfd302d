"""The first signal drains, a second one exits; and how the end of a process is told."""

import signal
import subprocess
import sys

import pytest

from genserve.signals import ending

PROGRAM = """
import asyncio
from genserve.signals import stop_on_signals

async def main():
    with stop_on_signals(lambda name: print(name, flush=True)):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
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
        assert process.wait(10) == 128 + number


def test_the_end_of_a_process_is_named_as_people_know_it() -> None:
    """A signal by its name, not by a negative number."""
    assert ending(0) == "ended with status 0"
    assert ending(3) == "ended with status 3"
    assert ending(-signal.SIGKILL) == "was ended by SIGKILL"
    assert ending(-(signal.SIGRTMIN + 1)) == f"was ended by signal {signal.SIGRTMIN + 1}"
