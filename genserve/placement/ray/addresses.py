"""What the process that talks to Ray tells the router: a line for each change, with the addresses of all replicas."""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import IO

from genserve.errors import ReplicaNotFoundError


class ServingAddresses:
    """The replicas that serve; written as they change. Members of a fleet."""

    def __init__(self, to: IO[bytes]) -> None:
        self._to = to
        self._known: set[str] = set()

    def add(self, address: str) -> None:
        """One serves."""
        self.put({*self._known, address})

    async def remove(self, address: str) -> None:
        """One serves no more. Raises ReplicaNotFoundError."""
        if address not in self._known:
            raise ReplicaNotFoundError(f"no replica {address!r} belongs to the fleet")
        self.put(self._known - {address})

    def put(self, addresses: Iterable[str]) -> None:
        """These are all. The first call tells that the fleet is there, whoever serves in it."""
        self._known = set(addresses)
        with suppress(OSError):  # the router has ended, and this process is about to be told
            self._to.write(json.dumps(sorted(self._known)).encode() + b"\n")
            self._to.flush()


def parsed(line: bytes) -> frozenset[str]:
    """The addresses of a line."""
    return frozenset(json.loads(line))
