"""The progress of a start, on stderr: a line that is rewritten on a terminal, elsewhere a line for each step."""

import asyncio
import sys
import time
from contextlib import suppress
from typing import Final

from genserve.control.conditions import Phase
from genserve.control.state import StateBoard
from genserve.observe.notices import can_rewrite, rewrite, say

_REDRAW_S: Final = 1.0


async def show_start(board: StateBoard) -> None:
    """Returns when the daemon serves, or is not going to."""
    on_terminal, said = can_rewrite(sys.stderr), ""
    while board.phase is Phase.STARTING:
        startup = board.startup
        if startup is None:
            pass  # nothing was told yet
        elif on_terminal:
            rewrite(startup.described(time.time()))
        elif startup.step != said:
            said = startup.step
            say(f"{said} ({startup.step_begin_s - startup.begin_s:.0f} s since the start)")
        with suppress(TimeoutError):
            async with asyncio.timeout(_REDRAW_S if on_terminal else None):
                await board.wait_change()
