"""When calls write, on a loop whose time passes as the test says."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from genserve.engine.generation import GenerationUpdate
from genserve.rpc.streams.turns import LONGEST_REST_S, REST, Turns, Writer
from tests.support.patience import STEP_S


class Loop:
    """What Turns uses of an event loop. Each write of a call takes `write_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.soon: deque[Callable[[], object]] = deque()
        self.later: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self.soon.append(lambda: callback(*args))

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        self.later.append((self.now_s + delay_s, callback))

    def run(self, until_s: float) -> None:
        """All that happens until then."""
        while True:
            while self.soon:
                self.soon.popleft()()
            due = [each for each in self.later if each[0] <= until_s]
            if not due:
                break
            first = min(due, key=lambda each: each[0])
            self.later.remove(first)
            self.now_s = max(self.now_s, first[0])
            first[1]()
        self.now_s = max(self.now_s, until_s)


class Stream:
    """A stream that always has something new when its engine says so."""

    request_id = "r"
    is_finished = False

    def __init__(self) -> None:
        self.gains: Callable[[], None] = lambda: None

    def take(self) -> GenerationUpdate | None:
        raise NotImplementedError

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        self.gains = callback

    def abort(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""


class Calls:
    """Calls of Generate that write for `write_s` each, one after the other, and note when, and how many tokens."""

    def __init__(self, count: int, write_s: float) -> None:
        self.loop: Any = Loop()
        self.written_s: list[list[float]] = [[] for _ in range(count)]
        self.num_unread = [0] * count
        self.messages: list[list[int]] = [[] for _ in range(count)]
        turns = Turns(self.loop)
        self.streams = [Stream() for _ in range(count)]
        self.writers = [Writer(stream, turns) for stream in self.streams]
        for number, writer in enumerate(self.writers):
            writer.release = self._released(number, write_s)  # type: ignore[method-assign]

    def _released(self, number: int, write_s: float) -> Callable[[], None]:
        def write() -> None:
            self.loop.now_s += write_s
            self.written_s[number].append(self.loop.now_s)
            self.messages[number].append(self.num_unread[number])
            self.num_unread[number] = 0
            self.writers[number]._has_written = True

        return lambda: self.loop.call_soon(write)

    def step(self, *numbers: int) -> None:
        """A step of the engine in which these requests gain a token."""
        for number in numbers:
            self.num_unread[number] += 1
            if self.num_unread[number] == 1:
                self.streams[number].gains()


def test_first_tokens_do_not_wait_for_a_turn() -> None:
    """Whoever writes, and however long."""
    calls = Calls(3, write_s=0.01)
    calls.step(0, 1)
    calls.loop.run(0.02)
    calls.step(0, 1)
    calls.loop.run(0.0)  # a turn of 0.02 s
    calls.step(2)
    calls.loop.run(0.0)
    assert calls.written_s[2] == [calls.loop.now_s], "at once, and not when the rest is over"


def test_a_step_is_a_message_of_each_call_while_there_is_time() -> None:
    """Steps that are further apart than a turn and its rest."""
    calls = Calls(4, write_s=0.001)
    for number in range(10):
        calls.step(0, 1, 2, 3)
        calls.loop.run((number + 1) * 0.02)
    assert [len(each) for each in calls.written_s] == [10] * 4


def test_calls_that_take_too_long_write_less_often() -> None:
    """Each turn has all calls in it, and between two turns there is a rest; nobody is left behind."""
    count, write_s, num_steps = 10, 0.001, 100
    calls = Calls(count, write_s)
    for _ in range(num_steps):
        calls.step(*range(count))
        calls.loop.run(calls.loop.now_s + 0.005)
    calls.loop.run(calls.loop.now_s + 1.0)
    turns_s = calls.written_s[0][1:]
    shortest_s = min(later - earlier for earlier, later in itertools.pairwise(turns_s))
    assert shortest_s > (1 + REST) * count * write_s * 0.999
    assert calls.messages == [calls.messages[0]] * count
    assert (calls.messages[0][0], sum(calls.messages[0])) == (1, num_steps)
    assert 2 * len(calls.messages[0]) < num_steps


def test_what_comes_in_a_rest_is_written_when_it_ends() -> None:
    """Also if no step follows: a paused engine keeps no token back."""
    calls = Calls(2, write_s=0.01)
    calls.step(0, 1)
    calls.loop.run(1.0)
    calls.step(0)
    calls.loop.run(1.0)
    calls.step(1)
    calls.loop.run(5.0)
    assert len(calls.written_s[1]) == 2
    assert calls.written_s[1][1] < 1.0 + 0.01 + REST * 0.01 + 0.011


def test_a_rest_has_an_end() -> None:
    """A turn in which the machine stood still for a minute is no reason to wait two."""
    calls = Calls(2, write_s=60.0)
    calls.step(0, 1)
    calls.loop.run(1.0)
    calls.step(0)
    calls.loop.run(calls.loop.now_s)
    ended_s = calls.loop.now_s
    calls.step(0)
    calls.loop.run(ended_s + 2 * LONGEST_REST_S)
    assert len(calls.written_s[0]) == 3


async def test_a_call_is_let_go_as_often_as_its_stream_says() -> None:
    """On a real loop: each time it may take what is new, and not once more."""
    stream = Stream()
    writer = Writer(stream, Turns(asyncio.get_running_loop()))
    for _ in range(3):
        stream.gains()
        await asyncio.wait_for(writer.turn(), STEP_S)
    waiting = asyncio.ensure_future(writer.turn())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
