"""Whose turn it is to change a lease of the fleet on the replicas."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakValueDictionary

from genserve.errors import DeadlineError

EVERY_LEASE: Final = ""
"""What `ending` is told when all leases end."""


class LeaseTurns:
    """A lease is granted by one call at a time, and not while another one ends it: a replica would take the grant for a
    repeat, and end it then.

    What ends a lease waits for nobody, because one replica that hangs would keep the others paused. A call that was
    granting it finds out, and undoes what it did.
    """

    def __init__(self) -> None:
        self._granting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._ending: dict[str, set[asyncio.Future[None]]] = {}

    async def take(self, lease_id: str, timeout_s: float) -> asyncio.Lock:
        """The turn to grant a lease, which the caller is to release. Raises DeadlineError."""
        turn = self._granting.setdefault(lease_id, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_s):
                await turn.acquire()
                try:
                    while ending := [*self._ending.get(lease_id, ()), *self._ending.get(EVERY_LEASE, ())]:
                        await asyncio.wait(ending)
                except BaseException:
                    turn.release()
                    raise
        except TimeoutError:
            raise DeadlineError(f"another pause or resume of this lease took {timeout_s:g} s") from None
        return turn

    async def over(self) -> None:
        """Returns when everybody whose turn it was has released it."""
        for turn in tuple(self._granting.values()):
            async with turn:
                pass

    @contextmanager
    def ending(self, lease_id: str) -> Iterator[None]:
        """While replicas are told to end a lease, it is nobody's turn to grant it."""
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
