"""The state that front ends need at each admission, as words in shared memory.

The daemon writes them before it announces a change, so a front end that reads them is never behind a message.
"""

import math

from genserve.aio import Change
from genserve.control.conditions import Phase
from genserve.control.state import StateBoard
from genserve.control.waits import LastPause
from genserve.memory.words import WORD_BYTES, SharedWords

_PHASE, _VERSION, _ANSWERS, _OVER, _NUM_PAUSES, _PAUSED_UNTIL, _CAUSE = range(7)
_MAX_CAUSE_BYTES = 512
_MAX_LEASE_ID_BYTES = 64
_MAX_HOLDER_BYTES = 512
_LEASE_ID = _CAUSE + _MAX_CAUSE_BYTES // WORD_BYTES
_HOLDER = _LEASE_ID + _MAX_LEASE_ID_BYTES // WORD_BYTES
NUM_WORDS = _HOLDER + _MAX_HOLDER_BYTES // WORD_BYTES
_PHASES = tuple(Phase)


class StateWriter:
    """Writes a board's state to the words, now and at each change."""

    def __init__(self, board: StateBoard, words: SharedWords) -> None:
        self._board = board
        self._words = words.ints
        self._floats = words.floats
        board.call_on_change(self._write)
        self._write()

    def _write(self) -> None:
        words, board = self._words, self._board
        # The version first: a request that is admitted under a phase finds the version of that time, or a later one.
        words[_VERSION] = board.weight_version
        words[_ANSWERS] = board.is_serving
        words[_OVER] = board.is_over
        self._write_text(_CAUSE, _LEASE_ID, board.cause_of_death)
        self._write_pause(board.last_pause)
        words[_PHASE] = _PHASES.index(board.phase)

    def _write_pause(self, pause: LastPause | None) -> None:
        if pause is not None:
            self._write_text(_LEASE_ID, _HOLDER, pause.lease_id)
            self._write_text(_HOLDER, NUM_WORDS, pause.holder)
            self._floats[_PAUSED_UNTIL] = math.inf if pause.expire_time_s is None else pause.expire_time_s
        self._words[_NUM_PAUSES] = 0 if pause is None else pause.num_others + 1

    def _write_text(self, start: int, end: int, text: str) -> None:
        """In these words, as much as there is room for. A reader may see a part of it: it is for people."""
        room = self._words[start:end].cast("B")
        encoded = text.encode(errors="replace")[: len(room)]
        room[:] = encoded.ljust(len(room), b"\0")


class SharedState:
    """The daemon's state, read from the words."""

    def __init__(self, words: SharedWords) -> None:
        self._words = words.ints
        self._floats = words.floats
        self._changed = Change()

    @property
    def phase(self) -> Phase:
        """The phase that clients see."""
        return _PHASES[self._words[_PHASE]]

    @property
    def cause_of_death(self) -> str:
        """Why the engine is dead, for people; "" while it lives."""
        return self._text(_CAUSE, _LEASE_ID)

    @property
    def last_pause(self) -> LastPause | None:
        """The pause that ends last, None if nobody pauses the engine."""
        if (count := self._words[_NUM_PAUSES]) == 0:
            return None
        until_s = self._floats[_PAUSED_UNTIL]
        lease_id, holder = self._text(_LEASE_ID, _HOLDER), self._text(_HOLDER, NUM_WORDS)
        return LastPause(lease_id, holder, None if math.isinf(until_s) else until_s, count - 1)

    @property
    def weight_version(self) -> int:
        """Version of the weights served."""
        return self._words[_VERSION]

    @property
    def is_serving(self) -> bool:
        """Whether health says SERVING."""
        return bool(self._words[_ANSWERS])

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return bool(self._words[_OVER])

    def notify(self) -> None:
        """Wakes every task that waits for a change. Call it when the daemon has announced one."""
        self._changed.notify()

    async def wait_change(self) -> None:
        """Returns when something changed after the call."""
        await self._changed.wait()

    def _text(self, start: int, end: int) -> str:
        return bytes(self._words[start:end]).rstrip(b"\0").decode(errors="ignore")
