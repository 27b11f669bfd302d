"""The routers of a fleet: one, whose place another host may take when it has crashed, or two side by side."""

import random

from tests.simulation.events import Events
from tests.simulation.network import Network
from tests.simulation.router import RouterHost


class Routers:
    """Both hosts. `are_two`: both run."""

    def __init__(self, network: Network, events: Events, *, are_two: bool) -> None:
        self.hosts = [RouterHost(f"10.0.1.{n}:1", network, events) for n in (1, 2)]
        self.are_two = are_two
        self._current = self.hosts[0]

    @property
    def running(self) -> list[RouterHost]:
        """Those that ought to run, whether they do or have crashed."""
        return self.hosts if self.are_two else [self._current]

    @property
    def in_charge(self) -> RouterHost:
        """The one that looks after replicas, or after most of them; if none does, the first one."""
        return max(self.running, key=lambda each: each.num_answering)

    def any(self, drawn: random.Random) -> RouterHost:
        """One of those that ought to run."""
        return drawn.choice(self.running) if self.are_two else self._current

    def move(self) -> None:
        """The other host takes the place of the only one."""
        self._current = self.hosts[self._current is self.hosts[0]]
