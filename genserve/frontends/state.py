"""The state that front ends need at each admission, as words in shared memory.

The daemon writes them before it announces a change, so a front end that reads them is never behind a message.
"""

from genserve.change import Change
from genserve.control.conditions import Phase
from genserve.control.state import StateBoard
from genserve.memory.words import WORD_BYTES, SharedWords

_PHASE, _VERSION, _ANSWERS, _OVER, _CAUSE = range(5)
_MAX_CAUSE_BYTES = 512
NUM_WORDS = _CAUSE + _MAX_CAUSE_BYTES // WORD_BYTES
_PHASES = tuple(Phase)


class StateWriter:
    """Writes a board's state to the words, now and at each change."""

    def __init__(self, board: StateBoard, words: SharedWords) -> None:
        self._board = board
        self._words = words.ints
        board.call_on_change(self._write)
        self._write()

    def _write(self) -> None:
        words, board = self._words, self._board
        # First the version: who is admitted under a phase finds the version that was served then, or a later one.
        words[_VERSION] = board.weight_version
        words[_ANSWERS] = board.is_serving
        words[_OVER] = board.is_over
        cause = board.cause_of_death.encode()[:_MAX_CAUSE_BYTES]
        words[_CAUSE:].cast("B")[: len(cause)] = cause
        words[_PHASE] = _PHASES.index(board.phase)


class SharedState:
    """The daemon's state, read from the words."""

    def __init__(self, words: SharedWords) -> None:
        self._words = words.ints
        self._changed = Change()

    @property
    def phase(self) -> Phase:
        """The phase that clients see."""
        return _PHASES[self._words[_PHASE]]

    @property
    def cause_of_death(self) -> str:
        """Why the engine is dead, for people; "" while it lives."""
        return bytes(self._words[_CAUSE:]).rstrip(b"\0").decode(errors="ignore")

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
        """Wakes everyone who waits for a change. Call when the daemon says that there was one."""
        self._changed.tell()

    async def wait_change(self) -> None:
        """Returns when something changed after the call."""
        await self._changed.wait()
