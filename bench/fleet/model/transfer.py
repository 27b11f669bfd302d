"""The first phase of a push: bytes that spread from host to host, as a simulation of discrete events.

Between two events every stream has a constant rate: a fair share of what its sender sends, at most what its receiver
takes, and at most the rate at which its sender gets bytes itself if it has passed on all it has. An event is what
changes a rate: a replica that begins, catches up with its parent, or has all, dies, or changes its source. So the time
of a transfer is exact, whatever its size, and a run takes as long as it has events.

A host of the model.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Final

from bench.fleet.model.calibration import Calibration
from bench.fleet.model.topology import TRAINER


@dataclass(eq=False, slots=True)
class Host:
    """The trainer, or a replica. Between two events its rate is constant, so its bytes are known at any time."""

    index: int
    sources: tuple[int, ...] = ()
    received: float = 0.0
    sent: float = 0.0
    rate: float = 0.0
    backlog: float = 0.0
    """Bytes that have arrived and are not prepared."""
    at_s: float = 0.0
    """When the figures above were true."""
    source: "Host | None" = None
    place: int = 0
    """Of its source among its sources."""
    children: "dict[int, Host]" = field(default_factory=dict)
    knows: bool = False
    is_alive: bool = True
    is_lost: bool = False
    """Whether it died with its host: nobody is told."""
    died_s: float = 0.0
    has_all: bool = False
    ended_s: float | None = None
    """When it had the end frame, and had checked everything that its children wait for."""
    ready_s: float | None = None
    """When it had prepared the push."""
    turn: int = 0
    """Predictions of earlier turns do not count any more."""
    stalled_turn: int = 0
    is_stalled: bool = False

    def advance(self, now_s: float, prepare_bytes_per_s: float) -> None:
        """Counts what has arrived since."""
        elapsed_s = now_s - self.at_s
        if elapsed_s > 0:
            arrived = self.rate * elapsed_s
            self.received += arrived
            if self.source is not None:
                self.source.sent += arrived
            if prepare_bytes_per_s * elapsed_s >= self.backlog + arrived:
                self.backlog = 0.0
            else:
                self.backlog = max(0.0, self.backlog + arrived - prepare_bytes_per_s * elapsed_s)
        self.at_s = now_s


def shares(total: float, limits: list[float]) -> list[float]:
    """A fair share of `total` for each; what one cannot use, the others do (max-min)."""
    found = [0.0] * len(limits)
    left = total
    order = sorted(range(len(limits)), key=limits.__getitem__)
    for number, index in enumerate(order):
        found[index] = min(limits[index], left / (len(order) - number))
        left -= found[index]
    return found


_NEAR_BYTES: Final = 64.0
_AGAIN_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Death:
    """A replica that dies. With its host, nobody gets a reset, and its children notice a stall."""

    index: int
    at_s: float
    with_host: bool = False


class Transfer:
    """`run` simulates it. Then `hosts` tells what each replica has, and `trainer` what it has sent."""

    def __init__(
        self,
        size_bytes: float,
        sources: Sequence[tuple[int, ...]],
        calibration: Calibration,
        deaths: Sequence[Death] = (),
    ) -> None:
        self.trainer = Host(TRAINER, received=size_bytes, knows=True, has_all=True, ended_s=0.0)
        self.hosts = [Host(index, own) for index, own in enumerate(sources)]
        self.head_died_s: float | None = None
        self.num_events = 0
        self._size = size_bytes
        self._constants = calibration
        self._heap: list[tuple[float, int, str, Host, int]] = []
        self._order = count()
        self._now_s = 0.0
        self._dirty: dict[int, Host] = {}
        self._waiting: dict[int, list[Host]] = {}
        for host in self.hosts:
            self._waiting.setdefault(host.sources[0], []).append(host)
        for host in self._waiting.pop(TRAINER):
            self._at(calibration.start_s + calibration.latency_s, "begin", host)
        for death in deaths:
            self.hosts[death.index].is_lost = death.with_host
            self._at(death.at_s, "die", self.hosts[death.index])

    def run(self) -> None:
        """Until every replica that lives has prepared the push, or the first one has died."""
        num_left = len(self.hosts)
        while self._heap and num_left and self.head_died_s is None:
            self._now_s = self._heap[0][0]
            while self._heap and self._heap[0][0] == self._now_s:
                _, _, kind, host, turn = heapq.heappop(self._heap)
                self.num_events += 1
                if not host.is_alive:
                    if kind == "begin":
                        self._miss(host)
                elif kind == "begin":
                    self._begin(host)
                elif kind == "rate" and turn == host.turn:
                    self._touch(host.source)
                elif kind == "end":
                    self._end(host)
                elif kind == "ready":
                    host.ready_s = self._now_s
                    num_left -= 1
                elif kind == "switch" and turn == host.stalled_turn:
                    self._switch(host)
                elif kind == "die":
                    num_left -= host.ready_s is None
                    self._die(host)
            self._share()

    def _at(self, at_s: float, kind: str, host: Host, turn: int = 0) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), kind, host, turn))

    def _touch(self, host: Host | None) -> None:
        if host is not None:
            self._dirty[host.index] = host

    def _begin(self, host: Host) -> None:
        """It knows the push, and fetches it; its children are told to."""
        if host.knows:
            return
        host.knows = True
        host.at_s = self._now_s
        self._tell(host, self._now_s)
        self._attach(host)

    def _tell(self, host: Host, at_s: float) -> None:
        for child in self._waiting.pop(host.index, ()):
            self._at(at_s + self._constants.level_s + self._constants.latency_s, "begin", child)

    def _miss(self, host: Host) -> None:
        """It has died before it knew the push: the router asks it in vain, and then its children try other sources."""
        missed_s = host.died_s + self._constants.silence_s if host.is_lost else self._now_s
        self._tell(host, max(self._now_s, missed_s))

    def _attach(self, host: Host) -> None:
        """To the source whose turn it is, or the next one."""
        index = host.sources[host.place]
        source = self.trainer if index == TRAINER else self.hosts[index]
        host.stalled_turn += 1
        host.is_stalled = False
        if not source.is_alive:
            wait_s = self._constants.stall_s if source.is_lost else self._constants.latency_s
            self._at(self._now_s + wait_s, "switch", host, host.stalled_turn)
            return
        if not source.knows:
            self._at(self._now_s + _AGAIN_S, "switch", host, host.stalled_turn)
            return
        host.source = source
        source.children[host.index] = host
        self._touch(source)
        if host.has_all and source.ended_s is not None:
            self._at(max(self._now_s, source.ended_s) + 2 * self._constants.latency_s, "end", host)

    def _detach(self, host: Host) -> None:
        host.advance(self._now_s, self._constants.prepare_bytes_per_s)
        host.rate = 0.0
        host.turn += 1
        if host.source is not None:
            host.source.children.pop(host.index, None)
            self._touch(host.source)
        host.source = None
        self._touch(host)

    def _switch(self, host: Host) -> None:
        if host.ended_s is not None:
            return
        self._detach(host)
        host.place = (host.place + 1) % len(host.sources)
        self._attach(host)

    def _die(self, host: Host) -> None:
        if host.index == 0 and host.sources[0] == TRAINER and self._now_s > 0:
            self.head_died_s = self._now_s
        children = list(host.children.values())
        self._detach(host)
        host.is_alive = False
        host.died_s = self._now_s
        for child in children:
            child.advance(self._now_s, self._constants.prepare_bytes_per_s)
            child.rate = 0.0
            child.turn += 1
            child.source = None
            child.stalled_turn += 1
            child.is_stalled = True
            wait_s = self._constants.stall_s if host.is_lost else self._constants.latency_s
            self._at(self._now_s + wait_s, "switch", child, child.stalled_turn)
            self._touch(child)

    def _end(self, host: Host) -> None:
        """It has the end frame; its children's come when it has checked what it has."""
        if host.ended_s is not None:
            return
        constants = self._constants
        host.advance(self._now_s, constants.prepare_bytes_per_s)
        digest_s = min(self._size, constants.hashed_last_bytes) / constants.digest_bytes_per_s
        host.ended_s = self._now_s + (digest_s if constants.names_digest else 0.0)
        rest_s = host.backlog / constants.prepare_bytes_per_s + (digest_s if constants.names_digest else 0.0)
        self._at(self._now_s + max(digest_s, rest_s), "ready", host)
        for child in host.children.values():
            if child.has_all:
                self._at(max(self._now_s, host.ended_s + constants.latency_s), "end", child)

    def _share(self) -> None:
        """Shares what the hosts send whose streams have changed, and what hosts below them send."""
        while self._dirty:
            _, host = self._dirty.popitem()
            if host.is_alive and host.children:
                self._share_of(host)

    def _share_of(self, parent: Host) -> None:
        now_s, constants = self._now_s, self._constants
        if parent is not self.trainer:
            parent.advance(now_s, constants.prepare_bytes_per_s)
        # What is whole is passed on; of what still arrives, the last chunk is not.
        lag = 0.0 if parent.has_all else constants.lag_bytes
        children = [child for child in parent.children.values() if not child.has_all]
        gaps: list[float] = []
        limits: list[float] = []
        for child in children:
            child.advance(now_s, constants.prepare_bytes_per_s)
            gap = parent.received - lag - child.received
            gaps.append(gap)
            limit = constants.receives
            if parent.has_all:
                if gap <= _NEAR_BYTES:
                    self._complete(child, parent)
                    limit = 0.0
            elif gap < -_NEAR_BYTES:
                limit = 0.0
            elif gap <= _NEAR_BYTES:
                limit = min(limit, parent.rate)
            limits.append(limit)
        for child, gap, rate in zip(children, gaps, shares(constants.sends, limits), strict=True):
            if rate != child.rate or child.has_all:
                child.rate = rate
                self._touch(child)
            if not child.has_all:
                self._predict(child, parent, gap)

    def _complete(self, child: Host, parent: Host) -> None:
        child.has_all = True
        missing = self._size - child.received
        child.received = self._size
        parent.sent += missing
        child.turn += 1
        child.stalled_turn += 1
        if parent.ended_s is not None:
            told_s = 0.0 if parent is self.trainer else parent.ended_s + self._constants.latency_s
            self._at(max(self._now_s, told_s), "end", child)

    def _predict(self, child: Host, parent: Host, gap: float) -> None:
        """When the next event of this stream is due, if nothing else happens."""
        child.turn += 1
        if parent.has_all:
            wait_s = gap / child.rate if child.rate else inf
        elif gap > _NEAR_BYTES:
            closing = child.rate - parent.rate
            wait_s = gap / closing if closing > 0 else inf
        elif gap < -_NEAR_BYTES:
            wait_s = -gap / parent.rate if parent.rate else inf
        else:
            wait_s = inf
        if wait_s < inf:
            # At least so long that the clock moves on.
            self._at(self._now_s + max(wait_s, 1e-9), "rate", child, child.turn)
        if child.rate > 0:
            if child.is_stalled:
                child.stalled_turn += 1
            child.is_stalled = False
        elif not child.is_stalled:
            child.is_stalled = True
            child.stalled_turn += 1
            self._at(self._now_s + self._constants.stall_s, "switch", child, child.stalled_turn)
