"""When the calls of Generate write what their requests have gained.

A message costs ten times as much as its token, most of it in the kernel. While there is time for that, each step of the
engine is a message of each call. Where writing takes too much of the time, the calls wait for a turn and write
together, and what a request gains meanwhile goes into one message: the more calls write, the more tokens a message has.
The first tokens of a request do not wait.

It is a trade of the gap between messages for CPU time: medians of 7 runs with turns (for any number of calls) and 7 of
the same tree without, in alternation, before an engine that computes nothing (bench.mock_engine), on two cores that had
other work too. Where a step takes 10 ms, the ranges of CPU time do not overlap. Those of tokens/s do in each row.

| calls | a step takes | CPU of the server a token, with and without | gap between messages | tokens/s |
|---|---|---|---|---|
| 64 | 10 ms | 77, 106 us | 15, 12 ms | 4,500, 4,600 |
| 256 | 10 ms | 57, 82 us | 48, 20 ms | 9,700, 8,600 |
| 256 | no time | 45, 59 us | 17, 5 ms | 16,500, 13,900 |

Where a step takes 30 ms, no difference showed with 64 calls.
"""

import asyncio
from typing import Final

FEW_CALLS: Final = 16
"""With so many at most there are no turns, which would cost each token four calls: their messages take a millisecond,
less than a step of most engines."""
REST = 2.0
"""The time between two turns, in that which the first one took: writing takes a third of the time at most."""
LONGEST_REST_S = 0.1
"""Something else may have taken the time of a turn."""


class Turns:
    """The turns of all calls of a server. `loop` runs them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.num_calls = 0
        """Calls whose requests have not ended."""
        self._waiting: list[asyncio.Semaphore] = []
        self._is_open = True  # a turn may begin at any time

    def enter(self, may_write: asyncio.Semaphore) -> None:
        """Releases a call in the next turn."""
        self._waiting.append(may_write)
        if self._is_open:
            self._is_open = False
            self._loop.call_soon(self._begin)  # with the others of this step

    def _begin(self) -> None:
        began_s = self._loop.time()
        waiting, self._waiting = self._waiting, []
        for may_write in waiting:
            may_write.release()
        self._loop.call_soon(self._end, began_s)  # after each of these calls has begun to write

    def _end(self, began_s: float) -> None:
        took_s = self._loop.time() - began_s
        self._loop.call_later(min(REST * took_s, LONGEST_REST_S), self._open)

    def _open(self) -> None:
        if self._waiting:
            self._begin()
        else:
            self._is_open = True
