"""How long tests wait. For what has to come: `until`. For what a stand-in takes: `slow`. For what only time brings: the
clocks of `tests.support.clocks`. A test that sleeps for a while and then looks passes on a busy machine without
having looked, so `tests.support.fixed_sleeps` refuses those.

GENSERVE_TEST_PATIENCE=3 waits three times as long before it gives up, on a machine that is slow or does other things.
"""

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from typing import Final

SCALE: Final = float(os.environ.get("GENSERVE_TEST_PATIENCE", "1"))

STEP_S: Final = 30.0 * SCALE
"""For one step of processes that run: a message, a file, a state. Ten times what a busy machine has taken."""
START_S: Final = 240.0 * SCALE
"""For a daemon or a router to serve. Two that start cold beside other work have taken two minutes."""
_LOOK_EVERY_S: Final = 0.01


async def until(holds: Callable[[], object], within_s: float = STEP_S) -> None:
    """Returns when `holds` is true, and else fails after `within_s` seconds. Others run meanwhile."""
    ends_s = _now() + within_s
    while not holds():
        if _now() > ends_s:
            raise AssertionError(f"not within {within_s:g} s: {_source(holds)}")
        await asyncio.sleep(_LOOK_EVERY_S)


def wait_until(holds: Callable[[], object], within_s: float = STEP_S) -> None:
    """As `until`, for what another process or thread brings about."""
    ends_s = _now() + within_s
    while not holds():
        if _now() > ends_s:
            raise AssertionError(f"not within {within_s:g} s: {_source(holds)}")
        time.sleep(_LOOK_EVERY_S)


async def turns(count: int = 20) -> None:
    """Lets everything that is ready run, `count` times over: for what must not happen, and needs no time to happen."""
    for _ in range(count):
        await asyncio.sleep(0)


async def slow(seconds: float) -> None:
    """What a stand-in takes for its work. No test may depend on how long that is."""
    await asyncio.sleep(seconds)


_now = time.perf_counter  # not the clocks that tests set forward


def _source(holds: Callable[[], object]) -> str:
    """What was waited for, as the test says it."""
    try:
        return inspect.getsource(holds).strip()
    except (OSError, TypeError):
        return repr(holds)
