"""Whether reads and writes of one version can have happened one after the other. Pure.

The search is Wing and Gong's in Lowe's form, just in time: it sweeps over the ends of operations, keeps every state
that the register may be in, and makes a pending write happen only when an end demands it. A read happens as soon as
the register has its value, which costs nothing.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MAX_STATES = 20_000


@dataclass(frozen=True, slots=True)
class Read:
    """The register had `version` at some moment in [from_s, to_s]. `what` says who saw it."""

    version: int
    from_s: float
    to_s: float
    what: str = ""


@dataclass(frozen=True, slots=True)
class Write:
    """A push that may have set the register, once, at some moment in [from_s, due_s]; `due_s` inf = or never.

    It needs a lower version before it unless `force`, `expected_version` and `previous_version` if they are given.
    """

    push_id: str
    version: int
    from_s: float
    due_s: float = math.inf
    force: bool = False
    expected_version: int | None = None
    previous_version: int | None = None

    def can_follow(self, version: int) -> bool:
        """Whether it may be applied while `version` is served."""
        if not self.force and self.version <= version:
            return False
        return all(need in (None, version) for need in (self.expected_version, self.previous_version))


@dataclass(frozen=True, slots=True)
class Contradiction:
    """The first operation that nothing explains; `possible` are the versions that may be served at its end."""

    operation: Read | Write
    possible: tuple[int, ...]

    @property
    def at_s(self) -> float:
        """When it was over."""
        return self.operation.to_s if isinstance(self.operation, Read) else self.operation.due_s


@dataclass(frozen=True, slots=True)
class _State:
    version: int
    applied: frozenset[int]  # of the pending writes
    met: frozenset[int]  # of the pending reads


def contradiction(reads: Iterable[Read], writes: Iterable[Write], initial: int = 0) -> Contradiction | None:
    """The first operation that cannot have happened, or None."""
    return _Search(list(reads), list(writes)).run(initial)


class _Search:
    def __init__(self, reads: list[Read], writes: list[Write]) -> None:
        seen = {read.version for read in reads} | {write.previous_version for write in writes}
        self._reads = reads
        # A write that nobody saw need not have happened, unless it went back and so made room for others.
        self._writes = [w for w in writes if w.force or math.isfinite(w.due_s) or w.version in seen]
        self._open_reads: set[int] = set()
        self._open_writes: set[int] = set()

    def run(self, initial: int) -> Contradiction | None:
        states = {_State(initial, frozenset(), frozenset())}
        for is_read, begins, i in self._events():
            pending = self._open_reads if is_read else self._open_writes
            if begins:
                pending.add(i)
                if is_read:
                    states = {_State(s.version, s.applied, s.met | self._satisfied(s.version, {i})) for s in states}
                continue
            following = {reached for state in states for reached in self._until(state, is_read, i)}
            if not following:
                operation = self._reads[i] if is_read else self._writes[i]
                return Contradiction(operation, tuple(sorted({state.version for state in states})))
            if len(following) > _MAX_STATES:
                raise RuntimeError(f"{len(following)} states: too many to search")
            pending.discard(i)
            states = {_State(s.version, s.applied - {i}, s.met) for s in following} if not is_read else following
            states = {_State(s.version, s.applied, s.met - {i}) for s in states} if is_read else states
        return None

    def _events(self) -> list[tuple[bool, bool, int]]:
        """(is a read, begins, index) in the order of time; at one moment beginnings first, so that they overlap."""
        events: list[tuple[float, bool, bool, int]] = []
        for i, read in enumerate(self._reads):
            events += [(read.from_s, False, True, i), (read.to_s, True, True, i)]
        for i, write in enumerate(self._writes):
            events.append((write.from_s, False, False, i))
            if math.isfinite(write.due_s):
                events.append((write.due_s, True, False, i))
        return [(is_read, not ends, i) for _, ends, is_read, i in sorted(events)]

    def _until(self, state: _State, is_read: bool, i: int) -> Iterator[_State]:
        """The states in which an operation has happened, reached with no more writes than that takes."""
        seen, waiting = {state}, [state]
        while waiting:
            state = waiting.pop()
            if i in (state.met if is_read else state.applied):
                yield state
                continue
            for j in self._open_writes - state.applied:
                write = self._writes[j]
                if not write.can_follow(state.version):
                    continue
                met = state.met | self._satisfied(write.version, self._open_reads)
                following = _State(write.version, state.applied | {j}, met)
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)

    def _satisfied(self, version: int, reads: set[int]) -> set[int]:
        return {i for i in reads if self._reads[i].version == version}
