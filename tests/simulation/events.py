"""What happened in a simulation, as nobody in it can see: in order, with virtual times."""

import asyncio
import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.virtual_time import Process


@dataclass(frozen=True)
class Kept:
    """A replica keeps a record of its fleet from now on. `push_id`: of the version that it names, "" = a checkpoint."""

    at_s: float
    address: str
    run: int
    epoch: int
    push_id: str
    content: bytes


@dataclass(frozen=True)
class Token:
    """A token that an engine has made, of weights with the number `content`."""

    at_s: float
    address: str
    content: int


@dataclass
class Push:
    """A push of a trainer. `content` numbers its bytes. `alone_at`: the replica that it was pushed to, not the fleet;
    "" = the fleet. `told_s`: when its trainer was told that it is applied; `over_s`: when nobody waited for it any
    more; `lost_s`: when nobody who could be reached had it any more; `gone_s`: when nobody had it at all, or its fleet
    had gone on without who has it."""

    content: int
    version: int
    push_id: str
    force: bool
    asked_s: float
    alone_at: str = ""
    told_s: float = math.inf
    over_s: float = math.inf
    lost_s: float = math.inf
    gone_s: float = math.inf
    is_refused: bool = False
    is_unknown: bool = False


ASLEEP = "asleep"
"""Instead of the id of a lease: the fleet sleeps."""


@dataclass
class Lease:
    """A pause that its holder was told of. `until_s`: when it may be over; `lost_s`: as of a push. `failed_s`: when its
    holder was told that there is none; `unheld_s`: when a router could last do nothing about it, because a replica
    that has it was free for none."""

    lease_id: str
    told_s: float
    until_s: float
    lost_s: float = math.inf
    failed_s: float = math.inf
    unheld_s: float = -math.inf


@dataclass
class AdapterChange:
    """A push of an adapter, or its unload: `push_id` is "". `told_s` and `lost_s`: as of a push of weights.
    `left_at`: the replicas that still had it when its unload was told, because they were away."""

    lora_name: str
    push_id: str
    told_s: float = math.inf
    lost_s: float = math.inf
    left_at: frozenset[str] = frozenset()

    @property
    def is_told(self) -> bool:
        """Whether somebody was told that it is done."""
        return self.told_s < math.inf

    @property
    def is_lost(self) -> bool:
        """Whether nobody had it at some time since."""
        return self.lost_s < math.inf


@dataclass
class Request:
    """A request for tokens of a client: `tokens` are those that it got, by their numbers."""

    asked_s: float
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: str = ""


class Events:
    """All that happened. `note` is for people, and for comparing two runs of one seed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.notes: list[tuple[Any, ...]] = []
        self.kept: list[Kept] = []
        self.tokens: list[Token] = []
        self.pushes: list[Push] = []
        self.leases: list[Lease] = []
        self.adapters: list[AdapterChange] = []
        self.requests: list[Request] = []
        self.wrong: list[str] = []

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self._loop.time()

    def note(self, *what: Any) -> None:
        """Something has happened."""
        self.notes.append((round(self.now_s, 6), *what))

    def token(self, address: str, process: Process, content: int) -> int:
        """An engine makes a token. Returns its number."""
        self.tokens.append(Token(self.now_s, address, content))
        return len(self.tokens)

    def violation(self, what: str) -> None:
        """Something was seen that must not be."""
        self.wrong.append(f"{self.now_s:.3f} {what}")

    @property
    def found_ids(self) -> set[str]:
        """The pushes that a router has found where nothing was written down: it takes the highest version."""
        return {kept.push_id for kept in self.kept if kept.epoch == 1}

    @property
    def digest(self) -> str:
        """Of everything."""
        told = (self.notes, self.kept, self.tokens, self.pushes, self.leases, self.adapters, self.requests, self.wrong)
        return hashlib.sha256(repr(told).encode()).hexdigest()
