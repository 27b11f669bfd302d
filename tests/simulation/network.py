"""A network in memory: what is sent from one host to another comes late, never, or after its sender has given up.

Messages of one call stay in order; those of different calls do not, as those of gRPC may not. A link between two hosts
can be cut, and every call over it can be broken.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from genserve.aio import Change
from genserve.rpc.services import ServiceTable
from tests.simulation.virtual_time import Process

if TYPE_CHECKING:
    from tests.simulation.calls import Conversation

_CLIENT_NOTICES_S, _SERVER_NOTICES_S = 20.0, 30.0
"""When a link has been cut for so long, keep-alive ends the calls over it, at either end."""


@dataclass
class Weather:
    """How the network is. Delays in seconds; `lost`: the share of calls that break."""

    usual_s: float = 0.003
    slow: float = 0.03
    slow_s: float = 0.8
    lost: float = 0.0


@dataclass(eq=False)
class Server:
    """What listens at a host."""

    process: Process
    table: ServiceTable
    saw: Callable[[str, Any, str], None] | None = None
    """Is told of each call that is carried out: its method, its metadata with the host of the caller, and that it "is
    let through", "begins" when its request is there, "lets in" who called, or "ends"."""


@dataclass(eq=False)
class Link:
    """Between two hosts."""

    network: "Network"
    is_cut: bool = False
    num_cuts: int = 0
    conversations: "dict[Conversation, None]" = field(default_factory=dict)
    held: list[Callable[[], None]] = field(default_factory=list)

    def cut(self) -> None:
        """Nothing comes through. Both ends notice late."""
        if self.is_cut:
            return
        self.is_cut = True
        self.num_cuts += 1
        loop, number = asyncio.get_running_loop(), self.num_cuts
        loop.call_later(_CLIENT_NOTICES_S, self._notice, number, True)
        loop.call_later(_SERVER_NOTICES_S, self._notice, number, False)

    def _notice(self, number: int, is_client: bool) -> None:
        if self.is_cut and self.num_cuts == number:
            for each in list(self.conversations):
                each.client_broke("keep-alive timed out") if is_client else each.server_broke()

    def heal(self) -> None:
        """What was on its way arrives."""
        if not self.is_cut:
            return
        self.is_cut = False
        held, self.held = self.held, []
        for arrive in held:
            arrive()
        self.network.changed.notify()

    def shake(self) -> None:
        """Every connection between the two breaks, and can be made anew."""
        for each in list(self.conversations):
            each.breaks(self.network.delay_s())


class Pipe:
    """One direction of a call: messages arrive in order."""

    def __init__(self, link: Link, deliver: Callable[[Any], None]) -> None:
        self._link = link
        self._deliver = deliver
        self._last_s = 0.0
        self._queue: deque[Any] = deque()

    def hold_up(self, for_s: float) -> None:
        """Nothing arrives for so long."""
        self._last_s = asyncio.get_running_loop().time() + for_s

    def send(self, message: Any) -> None:
        """It arrives some time."""
        loop = asyncio.get_running_loop()
        self._last_s = max(self._last_s, loop.time() + self._link.network.delay_s())
        self._queue.append(message)
        loop.call_at(self._last_s, self._arrive)

    def _arrive(self) -> None:
        if self._link.is_cut:
            self._link.held.append(self._arrive)
        else:
            self._deliver(self._queue.popleft())


class Network:
    """Hosts by their addresses, and the links between them. `drawn`: makes all that happens on the way."""

    def __init__(self, drawn: random.Random) -> None:
        self.drawn = drawn
        self.weather = Weather()
        self.changed = Change()
        self.strikes: Callable[[str, str], None] = lambda address, method: None
        """Is told of each call that begins to be carried out, before anything is done: faults strike then."""
        self.faults: list[str] = []
        """What programs did that none may do, such as raising an error that nobody foresaw."""
        self._servers: dict[str, Server] = {}
        self._links: dict[tuple[str, str], Link] = {}

    def link(self, one: str, other: str) -> Link:
        """The link between two hosts."""
        key = (one, other) if one < other else (other, one)
        if key not in self._links:
            self._links[key] = Link(self)
        return self._links[key]

    @property
    def links(self) -> dict[tuple[str, str], Link]:
        """All that were used."""
        return self._links

    def listen(self, address: str, server: Server) -> None:
        """From now on calls to this address reach this server."""
        self._servers[address] = server
        self.changed.notify()

    def server_at(self, address: str) -> Server | None:
        """Who listens there; None = nobody."""
        server = self._servers.get(address)
        return server if server is not None and server.process.is_alive else None

    def killed(self, process: Process) -> None:
        """The kernel of its host ends its connections."""
        for link in self._links.values():
            for each in list(link.conversations):
                each.process_killed(process)

    def delay_s(self) -> float:
        """How long a message takes."""
        weather, drawn = self.weather, self.drawn
        if drawn.random() < weather.slow:
            return drawn.random() * weather.slow_s
        return drawn.expovariate(1 / weather.usual_s)
