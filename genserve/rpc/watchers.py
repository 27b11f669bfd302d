"""Limits how many streams may watch one thing at a time, so that no role keeps those above it from watching."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from genserve.errors import QueueFullError
from genserve.security.access import calling
from genserve.security.roles import Role

MAX_WATCHERS: Final = 1024
RESERVE: Final = 128
"""How many more streams a role has than the one below it."""

_RANKS: Final = ("of callers without a role", *(f"of callers with the role {role.value}" for role in Role))
"""From the least to the most important. Whoever has several roles, as a router has, counts with the highest one."""


def budgets(limit: int) -> tuple[int, ...]:
    """The streams of callers of each rank and those below it, where rollout workers have `limit`."""
    return (limit // 2, limit, limit + RESERVE, limit + 2 * RESERVE)


class Watchers:
    """Counts the streams of one method, each of which takes memory and wakes up at every change. They are within the
    `budgets` of `limit`. `instead`: what a caller can do that meets its own."""

    def __init__(self, what: str, instead: str, limit: int = MAX_WATCHERS) -> None:
        self._what = what
        self._limits = budgets(limit)
        self._instead = instead
        self._counts: Counter[int] = Counter()

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Counts one more stream for the length of the block. Raises QueueFullError."""
        rank = _rank()
        # Those above do not count: they have places of their own.
        count, limit = sum(self._counts[below] for below in range(rank + 1)), self._limits[rank]
        if count >= limit:
            whose = "" if calling() is None else f" {_RANKS[rank]}"
            raise QueueFullError(
                f"{count} streams{whose} watch {self._what}, which is the limit: {self._instead}",
                retry_after_s=1.0,
                metadata={"limit": str(limit)},
            )
        self._counts[rank] += 1
        try:
            yield
        finally:
            self._counts[rank] -= 1


def _rank() -> int:
    """Of who makes the running call. Where no callers are listed, everybody has every role."""
    caller = calling()
    if caller is None:
        return len(_RANKS) - 1
    roles = frozenset() if caller.principal is None else caller.principal.roles
    return max((rank for rank, role in enumerate(Role, start=1) if role in roles), default=0)
