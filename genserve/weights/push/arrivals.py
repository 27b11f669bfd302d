"""Who is about to open or to fetch a push: nothing of it need be here yet, and a discard is meant for them as well."""

from collections.abc import Iterator
from contextlib import contextmanager

from genserve.errors import PushNotFoundError


class Arrival:
    """One that is about to open a push."""

    def __init__(self, push_id: str) -> None:
        self._push_id = push_id
        self._is_discarded = False

    def discard(self) -> None:
        """Nobody wants the push any more."""
        self._is_discarded = True

    def check(self) -> None:
        """Raises PushNotFoundError if the push was discarded meanwhile."""
        if self._is_discarded:
            raise PushNotFoundError(
                f"push {self._push_id!r} was discarded while it was opened", metadata={"push_id": self._push_id}
            )


class Arrivals:
    """All of them, by the ids of their pushes."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[Arrival]] = {}

    @contextmanager
    def begun(self, push_id: str) -> Iterator[Arrival]:
        """One more, for the length of the block."""
        arrival = Arrival(push_id)
        self._by_id.setdefault(push_id, []).append(arrival)
        try:
            yield arrival
        finally:
            left = self._by_id[push_id]
            left.remove(arrival)
            if not left:
                del self._by_id[push_id]

    def discard(self, push_id: str) -> None:
        """Nobody wants the push any more, in whoever's hands it is."""
        for arrival in self._by_id.get(push_id, ()):
            arrival.discard()
