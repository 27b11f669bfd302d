"""No version that a trainer was told of is lost: every order of pushes, commits, crashes and restarts of three replicas
and their router, by exploration. The router's decisions are the real ones; what it sends arrives or not, as the order
says.

A state is what replicas serve and keep, what the router knows and has under way, and what the trainer was told. The
rule is that of docs/fleet.md: who starts takes what the replica with the highest epoch has; one that answers later and
has a higher one is believed as long as this router has changed nothing.
"""

import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pytest

from genserve.fleet.config import FleetSettings
from genserve.fleet.desired import Desired, Version
from genserve.fleet.fleet import Fleet
from genserve.fleet.member import Member
from genserve.routing.names import make_chain, parse_policies
from genserve.v1 import control_pb2, types_pb2

NUM_REPLICAS: Final = 3
NUM_PUSHES: Final = 2
NUM_RESTARTS: Final = 2
NUM_CRASHES: Final = 1
"""Of replicas."""
START: Final = Version(0)


class Event(NamedTuple):
    """Something happens, to a replica if it has a number."""

    kind: str
    replica: int = -1


class Connection:
    """What a fleet needs of an upstream."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.member = Member(address)

    def cut(self) -> None:
        """It has no calls."""


@dataclass
class Replica:
    """A daemon. `life`: how often it has started. `pending`: it was told to commit this, and has not done so."""

    life: int = 0
    version: Version = START
    record: types_pb2.FleetState | None = None
    pending: types_pb2.FleetState | None = None
    answer: types_pb2.FleetState | None = None
    """It has committed this, and the router has not heard of it."""


@dataclass
class World:
    """Replicas, their router, and a trainer. `told`: the highest push that it was told is applied; `holders`: who has
    kept the record of it, in which life."""

    replicas: list[Replica] = field(default_factory=lambda: [Replica() for _ in range(NUM_REPLICAS)])
    fleet: Any = None
    known: set[int] = field(default_factory=set)
    """Replicas that this router watches."""
    pushing: types_pb2.FleetState | None = None
    num_pushes: int = 0
    num_restarts: int = 0
    num_crashes: int = 0
    told: int = 0
    holders: set[tuple[int, int]] = field(default_factory=set)

    def start_router(self, watched: set[int]) -> None:
        """One that these replicas answer before it decides."""
        chain = make_chain(parse_policies("requests"), random.Random(0), time.monotonic)
        self.fleet, self.known, self.pushing = Fleet(FleetSettings(), chain), set(), None
        self.fleet.desired = Desired(1 + self.num_restarts)
        for replica in self.replicas:
            replica.pending = replica.answer = None  # of a router that has gone: refused
        for number in sorted(watched):
            self.watch(number)
        self.fleet.settle()

    def watch(self, number: int) -> None:
        """The router hears what a replica serves and keeps."""
        replica, connection = self.replicas[number], Connection(f"r:{number}")
        if connection.address in self.fleet.upstreams:
            connection = self.fleet.upstreams[connection.address]
        else:
            self.fleet.add(connection)
        info = control_pb2.GetServerInfoResponse(fleet=replica.record)
        connection.member.connected(info)
        connection.member.reported(state_of(replica, number), control_pb2.Load())
        self.fleet.serves(connection, replica.version)
        if replica.record is not None:
            self.fleet.found(connection, replica.record)
        self.fleet.refresh()
        self.known.add(number)

    def events(self) -> Iterator[Event]:
        """What may happen next."""
        if self.fleet.committed is not None and self.pushing is None and self.num_pushes < NUM_PUSHES and self.known:
            yield Event("push")
        for number, replica in enumerate(self.replicas):
            if replica.pending is not None:
                yield Event("commit", number)
            if replica.answer is not None and number in self.known:
                yield Event("answer", number)
            if number not in self.known:
                yield Event("watch", number)
            elif self.is_behind(number):
                yield Event("sync", number)
            if self.num_crashes < NUM_CRASHES:
                yield Event("crash", number)
        if self.num_restarts < NUM_RESTARTS:
            for mask in range(1, 1 << NUM_REPLICAS):
                yield Event("restart", mask)

    def happen(self, event: Event) -> None:
        """It happens."""
        getattr(self, event.kind)(*([event.replica] if event.replica >= 0 else []))

    def push(self) -> None:
        """All replicas that get requests have prepared it, and are told to commit."""
        self.num_pushes += 1
        # The second push is a rollback: numbers say nothing.
        version = Version(10 - self.num_pushes, f"push {self.num_pushes}")
        self.pushing = self.fleet.record_with(version)
        self.fleet.begin_commit(self.pushing, self.fleet.ready)
        for upstream in self.fleet.ready:
            self.replicas[int(upstream.address[2:])].pending = self.pushing

    def commit(self, number: int) -> None:
        """The weights are exchanged, and the record is kept, in one moment."""
        replica = self.replicas[number]
        record, replica.pending = replica.pending, None
        assert record is not None
        replica.version = Version.of(record)
        if replica.record is None or replica.record.epoch <= record.epoch:
            replica.record = record
        replica.answer = record

    def answer(self, number: int) -> None:
        """As `_commit` of genserve.fleet.push.commit; the trainer is told when all have answered."""
        replica, upstream = self.replicas[number], self.fleet.upstreams[f"r:{number}"]
        record, replica.answer = replica.answer, None
        assert record is not None
        upstream.member.serves(Version.of(record))
        upstream.member.keeps(record)
        if self.fleet.committed is None or not self.fleet.committed.is_same(Version.of(record)):
            self.fleet.commit(Version.of(record), record.epoch)
        self.fleet.refresh()
        if not any(each.pending or each.answer for each in self.replicas):
            self.end_push()

    def end_push(self) -> None:
        """The trainer is told, if somebody has committed."""
        record, self.pushing = self.pushing, None
        if record is not None and self.fleet.committed.is_same(Version.of(record)):
            self.told = int(record.push_id[5:])
            self.holders = {
                (number, replica.life)
                for number, replica in enumerate(self.replicas)
                if replica.record is not None and replica.record.epoch >= record.epoch
            }

    def is_behind(self, number: int) -> bool:
        """Whether the router brings it to the version, or writes down there what the fleet is."""
        member, committed = self.fleet.upstreams[f"r:{number}"].member, self.fleet.committed
        if committed is None or self.replicas[number].pending or self.replicas[number].answer:
            return False
        if not member.version.is_same(committed):
            has_peer = any(self.replicas[other].version.is_same(committed) for other in self.known - {number})
            return has_peer and self.pushing is None and not member.is_ahead_of(committed)
        return member.record is None or member.record.epoch < self.fleet.desired.epoch

    def sync(self, number: int) -> None:
        """It is brought to the version, and told what the fleet is."""
        upstream, replica = self.fleet.upstreams[f"r:{number}"], self.replicas[number]
        replica.version, replica.record = self.fleet.committed, self.fleet.record()
        upstream.member.serves(replica.version)
        upstream.member.keeps(replica.record)
        self.fleet.refresh()

    def crash(self, number: int) -> None:
        """It starts anew with its checkpoint, and the router hears of both."""
        self.num_crashes += 1
        life = self.replicas[number].life
        self.replicas[number] = Replica(life + 1)
        if number in self.known:
            self.known.discard(number)
            self.fleet.lost(self.fleet.upstreams[f"r:{number}"], "gone")
        if self.pushing is not None and not any(each.pending or each.answer for each in self.replicas):
            self.end_push()

    def restart(self, mask: int) -> None:
        """The router is killed, and the next one hears of some replicas before it decides."""
        self.num_restarts += 1
        self.start_router({number for number in range(NUM_REPLICAS) if mask >> number & 1})

    def fault(self) -> str:
        """What must never be; "" = all is well."""
        by_epoch: dict[int, str] = {}
        for replica in self.replicas:
            if replica.record is not None:
                push = by_epoch.setdefault(replica.record.epoch, replica.record.push_id)
                if push != replica.record.push_id:
                    return f"two records of epoch {replica.record.epoch}"
        holders = {number for number, life in self.holders if self.replicas[number].life == life}
        if self.told and holders & self.known and self.fleet.committed is not None and self.pushing is None:
            served = int(self.fleet.committed.push_id[5:] or 0)
            if served < self.told:
                return f"the fleet serves push {served}, and the trainer was told of push {self.told}"
        return ""

    def key(self) -> tuple[Any, ...]:
        """Equal for worlds that go on alike."""
        desired = self.fleet.desired
        members = [self.fleet.upstreams.get(f"r:{number}") for number in range(NUM_REPLICAS)]
        each = (
            (
                (r.version, at(r.record), at(r.pending), at(r.answer), n in self.known, (n, r.life) in self.holders),
                None if m is None else (m.member.version, at(m.member.record), m.member.failure),
            )
            for n, (r, m) in enumerate(zip(self.replicas, members, strict=True))
        )
        return (
            tuple(sorted(each, key=repr)),  # which one is which does not matter
            (self.fleet.committed, desired.epoch, desired.is_own, desired.issued),
            (at(self.pushing), self.num_pushes, self.num_restarts, self.num_crashes, self.told),
        )


def at(record: types_pb2.FleetState | None) -> tuple[int, str] | None:
    """What tells records apart."""
    return None if record is None else (record.epoch, record.push_id)


def state_of(replica: Replica, number: int) -> types_pb2.EngineState:
    """What it reports."""
    return types_pb2.EngineState(
        instance_id=f"{number}.{replica.life}",
        phase=types_pb2.PHASE_RUNNING,
        weight_version=replica.version.number,
        push_id=replica.version.push_id,
    )


def world_after(events: tuple[Event, ...]) -> World:
    """A world in which these have happened."""
    world = World()
    world.start_router(set(range(NUM_REPLICAS)))
    for event in events:
        world.happen(event)
    return world


@pytest.mark.long("genserve/fleet")
def test_no_version_is_lost_in_any_order_of_crash_and_commit() -> None:
    """Every reachable state, once."""
    seen, waiting = {world_after(()).key()}, deque([()])
    while waiting:
        events: tuple[Event, ...] = waiting.popleft()
        for event in list(world_after(events).events()):
            after = world_after((*events, event))
            assert not after.fault(), f"{after.fault()}: {[*events, event]}"
            if (key := after.key()) not in seen:
                seen.add(key)
                waiting.append((*events, event))
    print(f"{len(seen)} states")
    assert len(seen) > 1000
