"""The clients by which torchrl's engine calls single replicas of a fleet."""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from genserve.client import ClientClosedError
from genserve.client.sync_client import Client
from genserve.transport.settings import ConnectionSettings


@dataclass(slots=True)
class _Direct:
    client: Client
    num_calls: int = 0


class ReplicaClients:
    """A client for each replica that is called, from any thread. `settings` are those of each."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._direct: dict[str, _Direct] = {}
        self._is_closed = False

    @property
    def addresses(self) -> list[str]:
        """Those of the clients that are open."""
        with self._lock:
            return [*self._direct]

    @contextmanager
    def using(self, address: str, present: Collection[str]) -> Iterator[Client]:
        """The client of this replica, for calls within the block. Clients of replicas that are not `present` any more
        are closed when their calls have ended: a replica that is started again has another address. Raises
        ClientClosedError after `close`."""
        with self._lock:
            if self._is_closed:
                raise ClientClosedError("the engine is shut down")
            gone = [each for each, direct in self._direct.items() if each not in present and not direct.num_calls]
            unused = [self._direct.pop(each).client for each in gone]
            if address not in self._direct:
                self._direct[address] = _Direct(Client(address, **self._settings))
            direct = self._direct[address]
            direct.num_calls += 1
        try:
            for client in unused:
                client.close()
            yield direct.client
        finally:
            with self._lock:
                direct.num_calls -= 1

    def close(self) -> None:
        """Closes all, with the calls that run. May be repeated."""
        with self._lock:
            self._is_closed = True
            clients = [each.client for each in self._direct.values()]
        for client in clients:
            client.close()
