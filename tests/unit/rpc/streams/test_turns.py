"""When calls write, on a loop whose time passes as the test says."""

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

from genserve.rpc.streams.turns import LONGEST_REST_S, REST, Turns


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


class Call:
    """What a turn releases: a call that writes, when the loop comes to it, for `write_s`. It notes when, and how many
    tokens."""

    def __init__(self, loop: Loop, write_s: float) -> None:
        self._loop = loop
        self._write_s = write_s
        self.num_unread = 0
        self.written_s: list[float] = []
        self.messages: list[int] = []

    def release(self) -> None:
        self._loop.call_soon(self._write)

    def _write(self) -> None:
        self._loop.now_s += self._write_s
        self.written_s.append(self._loop.now_s)
        self.messages.append(self.num_unread)
        self.num_unread = 0


class Calls:
    """Calls of Generate that write one after the other. None of them has written yet: first tokens wait for no turn."""

    def __init__(self, count: int, write_s: float) -> None:
        self.loop: Any = Loop()
        self._turns = Turns(self.loop)
        self._calls: list[Any] = [Call(self.loop, write_s) for _ in range(count)]

    @property
    def written_s(self) -> list[list[float]]:
        return [call.written_s for call in self._calls]

    @property
    def messages(self) -> list[list[int]]:
        return [call.messages for call in self._calls]

    def step(self, *numbers: int) -> None:
        """A step of the engine in which these requests gain a token."""
        for number in numbers:
            call = self._calls[number]
            call.num_unread += 1
            if not call.messages:
                call.release()
            elif call.num_unread == 1:
                self._turns.enter(call)


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
