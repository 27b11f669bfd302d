"""Pause leases of the fleet: each is one lease on every replica. No I/O; expiry times are on the wall clock.

The leases of replicas name the lease of the fleet that they are a part of, and every status has them. Which ones are
this fleet's is written down in its record: what a replica brings along from elsewhere ends there.
"""

import hashlib
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from genserve.errors import InvalidFieldError, PauseLeaseLostError
from genserve.v1 import types_pb2

_LEASE_ID: Final = "[0-9a-f]{32}"
MAX_ENDED: Final = 1 << 14
MAX_WRITTEN_BYTES: Final = 96 << 10
"""Of all leases in the record of a fleet, of which replicas keep 256 KiB."""
_MOST_BYTES: Final = 1200
"""Of one lease: its holder may have 256 characters of four bytes."""
LEAST_S: Final = 1.0
"""A lease that ends sooner is not given to a replica that joins, which gets no requests until the lease has ended: it
could be the last one that has it, and the others would be paused anew."""


def is_lease_id(text: str) -> bool:
    """Whether a lease of a fleet may be called so."""
    return re.fullmatch(_LEASE_ID, text) is not None


def new_lease_id(request_id: str) -> str:
    """The id of a lease of the fleet: the same for the same `request_id`, also after a restart of the router."""
    return hashlib.sha256(request_id.encode()).hexdigest()[:32] if request_id else uuid.uuid4().hex


@dataclass(slots=True)
class FleetLease:
    """A lease of the fleet. `on_replicas`: the lease of each replica, by its address. `away`: those of replicas
    that do not answer, and have it still. `given_up`: replicas that had it, and where somebody else has
    ended it. `renewed_on`: replicas that know that it was renewed, None = it was not."""

    lease_id: str
    holder: str
    on_replicas: dict[str, types_pb2.PauseLease] = field(default_factory=dict)
    away: dict[str, types_pb2.PauseLease] = field(default_factory=dict)
    given_up: set[str] = field(default_factory=set)
    renewed_on: set[str] | None = None

    @property
    def held(self) -> Mapping[str, types_pb2.PauseLease]:
        """The leases of replicas that say when it ends."""
        return self.on_replicas or self.away

    def is_behind_on(self, address: str) -> bool:
        """Whether a replica has it, and was away when it was renewed: it would end there too soon."""
        return self.renewed_on is not None and address in self.held and address not in self.renewed_on

    @property
    def mode(self) -> "types_pb2.PauseMode.ValueType":
        """How requests in flight were treated."""
        return next(iter(self.held.values())).mode

    @property
    def expire_time_s(self) -> float | None:
        """When the first of them ends, in seconds since 1970; None = never."""
        leases = [lease for address, lease in self.held.items() if not self.is_behind_on(address)] or self.held.values()
        return min(
            (each.expire_time.ToNanoseconds() / 1e9 for each in leases if each.HasField("expire_time")), default=None
        )

    def remaining_s(self) -> float | None:
        """Seconds until then."""
        return None if (end_s := self.expire_time_s) is None else end_s - time.time()

    def message(self) -> types_pb2.PauseLease:
        """For the wire."""
        lease = types_pb2.PauseLease(lease_id=self.lease_id, holder=self.holder, mode=self.mode)
        if (expire_time_s := self.expire_time_s) is not None:
            lease.expire_time.FromNanoseconds(round(expire_time_s * 1e9))
        return lease


def _is_over(lease: types_pb2.PauseLease) -> bool:
    return lease.HasField("expire_time") and lease.expire_time.ToNanoseconds() / 1e9 <= time.time()


class Grant:
    """The leases that replicas have granted for one of the fleet. `own_ids`: their ids on the replicas, by address."""

    def __init__(self, held: FleetLease | None) -> None:
        """`held`: the lease of the fleet, if it is held already."""
        self._reported: Mapping[str, types_pb2.PauseLease] = {} if held is None else held.held
        self._before = dict(self._reported)
        self.own_ids: dict[str, str] = {}

    @property
    def is_new(self) -> bool:
        """Whether the lease of the fleet was not held before, or it has expired. The router may not have been told that
        yet, but then all replicas that had it have granted another one, or its time is over: a call that was cancelled
        may have been granted another one without being told."""
        return not any(map(self._has_it_still, self._before))

    def _has_it_still(self, address: str) -> bool:
        before = self._before[address]
        reported = self._reported.get(address, before)  # it may have been renewed
        return self.own_ids.get(address, reported.lease_id) == before.lease_id and not _is_over(reported)


class Leases:
    """The leases of the fleet, as the replicas report them."""

    def __init__(self) -> None:
        self._leases: dict[str, FleetLease] = {}
        self._ended: OrderedDict[str, bool] = OrderedDict()  # the id -> whether by others
        self._beginning: set[str] = set()
        self._expected: dict[str, types_pb2.PauseLease] = {}
        self._own: OrderedDict[str, None] | None = None  # what this fleet has ever granted, when it is known

    def adopt(self, lease_ids: Iterable[str]) -> None:
        """These are the leases of the fleet, and those that it grants from now on. Others end where they are held."""
        self._own = OrderedDict.fromkeys(self._beginning)  # what is not written down any more has ended
        for lease_id in lease_ids:
            self._note_own(lease_id)
            self._ended.pop(lease_id, None)
        for lease_id in self._leases:
            self._end_foreign(lease_id)

    def expect(self, written: Iterable[types_pb2.PauseLease]) -> None:
        """These leases are written down. Each stays so until a replica has reported it, which may come later."""
        self._expected = {lease.lease_id: lease for lease in written}

    def to_write(self) -> list[types_pb2.PauseLease]:
        """The leases to write down."""
        expected = [each for each in self._expected.values() if each.lease_id not in self._ended and not _is_over(each)]
        return [*(lease.message() for lease in self.active), *expected]

    def check_room(self, lease_id: str, holder: str) -> None:
        """Raises InvalidFieldError if no lease of this holder can be written down with the others."""
        if lease_id in self._leases:
            return
        new = types_pb2.PauseLease(lease_id=lease_id, holder=holder, mode=types_pb2.PAUSE_MODE_KEEP)
        new.expire_time.GetCurrentTime()
        written = [*self.to_write(), new]
        size_bytes = sum(each.ByteSize() for each in written) + len(self._beginning) * _MOST_BYTES
        if size_bytes > MAX_WRITTEN_BYTES:
            raise InvalidFieldError.of(
                "holder",
                f"is too long: {len(written)} pauses with the names of their holders have {size_bytes} bytes, and the "
                f"record of a fleet takes {MAX_WRITTEN_BYTES}: end one, or take a shorter name",
            )

    def _note_own(self, lease_id: str) -> None:
        if self._own is not None:
            self._own[lease_id] = None
            self._own.move_to_end(lease_id)
            while len(self._own) > MAX_ENDED:
                self._own.popitem(last=False)

    def _end_foreign(self, lease_id: str) -> None:
        if self._own is not None and lease_id not in self._own and lease_id not in self._ended:
            self.mark_ended(lease_id, by_others=True)

    @property
    def active(self) -> list[FleetLease]:
        """The leases that are held and were not ended. One that begins may still fail."""
        known = self._leases.values()
        held = [each for each in known if each.on_replicas or not all(map(_is_over, each.away.values()))]
        return [each for each in held if each.lease_id not in self._ended and each.lease_id not in self._beginning]

    def reported(self, address: str, pauses: "Iterable[types_pb2.PauseLease]") -> bool:
        """A replica has reported all of its leases. Returns whether they are others than before, or have more time."""
        leases = self._leases.values()
        before = {lease.lease_id: lease.on_replicas[address] for lease in leases if address in lease.on_replicas}
        held: dict[str, types_pb2.PauseLease] = {}
        for pause in pauses:
            if lease_id := pause.fleet_lease_id:
                held[lease_id] = pause
                self._end_foreign(lease_id)
                if self._own is not None and lease_id in self._own:
                    self._own.move_to_end(lease_id)
                self._note(lease_id, pause.holder, address, pause)
        for lease_id in before.keys() - held.keys():
            # It had it, and somebody else has ended it there: an operator, or another router.
            if not self._leases[lease_id].is_behind_on(address):
                self._leases[lease_id].given_up.add(address)
            self.resumed(lease_id, address)
        for lease in [each for each in leases if address in each.away]:
            self.resumed(lease.lease_id, address)  # another run, or it has ended there meanwhile
        return held != before

    def left(self, address: str) -> None:
        """A replica does not answer, or was removed: when it is back, it may lack what it had."""
        active = {each.lease_id for each in self.active}
        for lease in list(self._leases.values()):
            lease.given_up.discard(address)
            if lease.lease_id in active and address in lease.on_replicas:
                # It is held still, and will be told again: replicas that join until then are paused.
                lease.away[address] = lease.on_replicas.pop(address)
            elif address not in lease.away:
                self.resumed(lease.lease_id, address)

    @contextmanager
    def being_granted(self, lease_id: str) -> Iterator[Grant]:
        """While replicas are asked for a lease. One that had ended lives again, until it is marked as ended. One that
        nobody held counts afterwards."""
        held = self._leases.get(lease_id) if lease_id not in self._ended else None
        self._ended.pop(lease_id, None)
        self._note_own(lease_id)
        if held is None:
            self._beginning.add(lease_id)
        grant = Grant(held)
        try:
            yield grant
        finally:
            self._beginning.discard(lease_id)
            if (lease := self._leases.get(lease_id)) is not None:
                # What has expired on a replica before the others had granted it was ended by nobody.
                lease.given_up.difference_update(grant.own_ids)

    def granted(self, lease_id: str, holder: str, address: str, lease: types_pb2.PauseLease) -> None:
        """A replica has a lease; its status shows it too. If somebody has ended it meanwhile, it stays ended."""
        known = self._note(lease_id, holder, address, lease)
        if known.renewed_on is not None:
            known.renewed_on.add(address)

    def renewed(self, lease_id: str, addresses: Iterable[str]) -> None:
        """These replicas have renewed a lease. The others that have it are to do so."""
        if (known := self._leases.get(lease_id)) is not None:
            known.renewed_on = set(addresses)

    def _note(self, lease_id: str, holder: str, address: str, lease: types_pb2.PauseLease) -> FleetLease:
        self._expected.pop(lease_id, None)
        known = self._leases.setdefault(lease_id, FleetLease(lease_id, holder))
        known.on_replicas[address] = lease
        known.away.pop(address, None)
        known.given_up.discard(address)
        return known

    def left_over(self, address: str) -> list[tuple[str, str]]:
        """Ended leases that a replica still has, because it was away, and what they are called there."""
        return [
            (lease.lease_id, lease.on_replicas[address].lease_id)
            for lease in self._leases.values()
            if lease.lease_id in self._ended and address in lease.on_replicas
        ]

    def has_foreign(self, address: str) -> bool:
        """Whether a replica still has a lease that is not of this fleet."""
        own = self._own
        return own is not None and any(lease_id not in own for lease_id, _ in self.left_over(address))

    def resumed(self, lease_id: str, address: str) -> None:
        """A replica does not have a lease any more."""
        if (lease := self._leases.get(lease_id)) is not None:
            lease.on_replicas.pop(address, None)
            lease.away.pop(address, None)
            if not lease.held:
                del self._leases[lease_id]

    def known(self, lease_id: str) -> FleetLease | None:
        """The lease, also if it was ended: some replicas may still have it."""
        return self._leases.get(lease_id)

    def mark_ended(self, lease_id: str, *, by_others: bool = False) -> None:
        """Remembers for a while that a lease has ended: it is not given to replicas any more. `by_others`: its holder
        has not ended it, or only when it had expired."""
        self._ended[lease_id] = by_others
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def mark_all_ended(self) -> None:
        """The same of all leases, also those that begin."""
        for lease_id in [*self._leases, *self._expected, *self._beginning]:
            self.mark_ended(lease_id, by_others=True)

    def is_beginning(self, lease_id: str) -> bool:
        """Whether replicas are asked for a lease that nobody held."""
        return lease_id in self._beginning

    def was_ended(self, lease_id: str) -> bool:
        """Whether somebody has ended a lease, not long ago."""
        return lease_id in self._ended

    def was_ended_by_others(self, lease_id: str) -> bool:
        """Whether it was not its holder, so that the engine may have run."""
        return self._ended.get(lease_id, False)

    def get(self, lease_id: str) -> FleetLease:
        """The lease. Raises PauseLeaseLostError."""
        lease = self._leases.get(lease_id)
        if lease is None or lease_id in self._ended:
            raise PauseLeaseLostError(
                f"no replica has the pause lease {lease_id!r}: it is unknown or has expired",
                metadata={"lease_id": lease_id},
            )
        return lease

    def of_replica(self, lease_id: str, address: str) -> str:
        """The id of a lease on one replica. Raises PauseLeaseLostError."""
        on_replica = self.get(lease_id).on_replicas.get(address)
        if on_replica is None:
            raise PauseLeaseLostError(f"replica {address} does not have the pause lease {lease_id!r}")
        return on_replica.lease_id

    def missing(self, address: str, least_s: float = 0.0) -> list[FleetLease]:
        """The leases of others that a replica lacks, or would end too soon, and that last longer than this."""
        if not self._leases:
            return []  # the common case, asked at every report
        lacking = [each for each in self.active if address not in each.on_replicas and address not in each.given_up]
        lacking += [each for each in self.active if each.is_behind_on(address)]
        return [lease for lease in lacking if (left_s := lease.remaining_s()) is None or left_s > least_s]

    def to_give(self, address: str) -> list[FleetLease]:
        """Those that a replica lacks, and that last long enough to be given to it."""
        return self.missing(address, LEAST_S)
