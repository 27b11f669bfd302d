"""Whose turn it is to change a lease of the fleet on the replicas."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

from genserve.errors import DeadlineError


class LeaseTurns:
    """A lease is granted by one call at a time, and by none while the lease is being ended. Otherwise a replica that is
    yet to be told of the end would answer with the old lease, which then ends.

    Whoever ends a lease waits for nobody, because one replica that hangs would keep the others paused. A call that was
    granting the lease finds out at its end, and undoes what it did.
    """

    def __init__(self) -> None:
        self._granting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._ending: dict[str | None, set[asyncio.Future[None]]] = {}

    async def take(self, lease_id: str, timeout_s: float) -> asyncio.Lock:
        """The turn to grant a lease, which the caller is to release. Raises DeadlineError."""
        turn = self._granting.setdefault(lease_id, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s):
                await turn.acquire()
                try:
                    while ending := [*self._ending.get(lease_id, ()), *self._ending.get(None, ())]:
                        await asyncio.wait(ending)
                except BaseException:
                    turn.release()
                    raise
        except TimeoutError:
            raise DeadlineError(f"other pauses and resumes took {timeout_s:g} s") from None
        return turn

    async def over(self) -> None:
        """Returns when everybody whose turn it was has released it."""
        for turn in tuple(self._granting.values()):
            async with turn:
                pass

    @contextmanager
    def ending(self, lease_id: str | None = None) -> Iterator[None]:
        """While replicas are told to end a lease, it is nobody's turn to grant it. None = all leases."""
        ended = asyncio.get_running_loop().create_future()
        ending = self._ending.setdefault(lease_id, set())
        ending.add(ended)
        try:
            yield
        finally:
            ended.set_result(None)
            ending.discard(ended)
            if not ending:
                del self._ending[lease_id]
