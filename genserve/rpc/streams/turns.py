"""When the calls of Generate write what their requests have gained.

A message costs ten times as much as its token, most of it in the kernel. While there is time for that, each step of the
engine is a message of each call. Where writing takes too much of the time, the calls wait for a turn and write
together, and what a request gains meanwhile goes into one message: the more calls write, the more tokens a message has.
The first tokens of a request do not wait.
"""

import asyncio

from genserve.engine.protocol import GenerationStream

REST = 2.0
"""The time between two turns, in that which the first one took: writing takes a third of the time at most."""
LONGEST_REST_S = 0.1
"""Something else may have taken the time of a turn."""


class Turns:
    """The turns of all calls of a server. `loop` runs them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[Writer] = []
        self._is_open = True  # a turn may begin at any time

    def enter(self, writer: "Writer") -> None:
        """Lets a call write in the next turn."""
        self._waiting.append(writer)
        if self._is_open:
            self._is_open = False
            self._loop.call_soon(self._begin)  # with the others of this step

    def _begin(self) -> None:
        began_s = self._loop.time()
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            writer.release()
        self._loop.call_soon(self._end, began_s)  # after each of these calls has begun to write

    def _end(self, began_s: float) -> None:
        took_s = self._loop.time() - began_s
        self._loop.call_later(min(REST * took_s, LONGEST_REST_S), self._open)

    def _open(self) -> None:
        if self._waiting:
            self._begin()
        else:
            self._is_open = True


class Writer:
    """One call: waits until its stream has something new, and it is the call's turn."""

    def __init__(self, stream: GenerationStream, turns: Turns) -> None:
        self._turns = turns
        self._may_write = asyncio.Semaphore(0)
        self._has_written = False
        stream.call_when_ready(self._enter)

    async def turn(self) -> None:
        """Returns when the call may take what is new, and write it."""
        await self._may_write.acquire()
        self._has_written = True

    def release(self) -> None:
        """It is the call's turn."""
        self._may_write.release()

    def _enter(self) -> None:
        if self._has_written:
            self._turns.enter(self)
        else:
            self.release()
