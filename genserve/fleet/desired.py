"""What a fleet should be, leases apart: its version, sleep and adapters, and the epoch of it. Pure.

Each change has an epoch of its own. It is written to the replicas, with the version, the leases and the rest: a router
that starts takes what the replica with the highest epoch has. It numbers its own changes from the second on in which it
has started, times 2^32, so that they are above all of the routers before. Of those that it has not seen, this holds
only if its clock is not behind theirs. Of two that start in the same second, a mark of each keeps the numbers apart.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

from genserve.control import asleep
from genserve.control.membership import EPOCHS_PER_S
from genserve.errors import InvalidFieldError
from genserve.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Version:
    """What a replica serves. `push_id`: of the push that brought it, "" = its checkpoint or vLLM's own transfer.
    `content_digest`: as in PushHeader, "" = not known. `base_digest`: tells the checkpoint apart that the replica has
    started with, "" = not known."""

    number: int
    push_id: str = ""
    content_digest: str = ""
    base_digest: str = ""

    @classmethod
    def of(cls, message: types_pb2.EngineState | types_pb2.FleetState) -> Self:
        """As a replica, or the record of a fleet, reports it."""
        return cls(message.weight_version, message.push_id, message.content_digest, message.base_digest)

    @property
    def is_checkpoint(self) -> bool:
        """Whether a replica that starts has it: it was never pushed."""
        return self.number == 0 and not self.push_id

    def is_same(self, other: "Version") -> bool:
        """Whether both have the same number and the same bytes, as far as is known."""
        if self.number != other.number:
            return False
        if self.is_checkpoint and other.is_checkpoint and self.base_digest and other.base_digest:
            return self.base_digest == other.base_digest
        return self.push_id == other.push_id or self.content_digest == other.content_digest != ""


def newest(versions: Iterable[Version]) -> Version | None:
    """The version of a fleet of which no record is left: the highest, and of two with this number the one that more
    replicas serve."""
    counts = Counter(versions)
    return max(counts, key=lambda version: (version.number, counts[version], version.push_id), default=None)


_MARKED: Final = 1 << 16
MAX_LORAS_BYTES: Final = 128 << 10
"""Half of what replicas keep: see genserve.rpc.convert.control. Leases have most of the rest."""


@dataclass(frozen=True, slots=True)
class FleetSleep:
    """What sleeps on all replicas. `level`: of the Sleep that did it, None = none did, or only parts sleep."""

    tags: frozenset[str] = frozenset()
    level: int | None = None

    def after_sleep(self, depth: asleep.SleepDepth) -> "FleetSleep":
        """What sleeps on a replica that was as the fleet, after this Sleep."""
        before = asleep.Asleep(asleep.tags_of(sorted(self.tags)))
        if not before.takes(depth):
            return self
        tags = before.after_sleep(depth).names
        return FleetSleep(frozenset(tags), depth.level if "weights" in tags else None)

    def after_wake_up(self, tags: Collection[str]) -> "FleetSleep":
        """The same after a WakeUp of these parts; none = all."""
        left = asleep.Asleep(asleep.tags_of(sorted(self.tags))).after_wake_up(asleep.tags_of(list(tags))).names
        return FleetSleep(frozenset(left), self.level if "weights" in left else None)


class Desired:
    """What a fleet should be. `epoch`: of what it is now, 0 = the router does not know yet. `issued`: the highest that
    was given to a change, which may yet fail. `is_own`: this router has changed it. `loras`: the directories of
    adapters that all have loaded from one, by their names; `pushed_loras`: the pushes that have brought the others."""

    def __init__(self, started_s: float, mark: int = 0) -> None:
        """`started_s`: when the router has started, in Unix seconds. `mark`: 16 bits that another router which has
        started in the same second hardly has."""
        self._life = self._first = 0
        self._mark = mark
        self._started_s = int(started_s)
        self.epoch = 0
        self.asleep = FleetSleep()
        self.loras: dict[str, str] = {}
        self.pushed_loras: dict[str, str] = {}
        self._changing_loras: set[str] = set()
        self.issued = 0
        self._issued_at_adopt = 0  # epochs up to this one were issued before a record of another router was adopted
        self.is_own = False
        self._changing_sleep: list[frozenset[str]] = []
        self._loading: dict[str, str] = {}

    def knows(self, epoch: int) -> bool:
        """Whether a record of this epoch has nothing new to say: it is old, or of this router itself."""
        return epoch <= self.epoch or self._first < epoch <= self.issued

    @property
    def asleep_tags(self) -> frozenset[str] | None:
        """What sleeps on all replicas; None while that changes."""
        return None if self._changing_sleep else self.asleep.tags

    @property
    def may_sleep(self) -> frozenset[frozenset[str]]:
        """What may sleep on a replica that gets requests: as much as before a change, or as after it."""
        return frozenset((self.asleep.tags, *self._changing_sleep))

    @contextmanager
    def changing_sleep(self, after: FleetSleep) -> Iterator[None]:
        """While replicas fall asleep or wake up one by one, until this sleeps."""
        self._changing_sleep.append(after.tags)
        try:
            yield
        finally:
            self._changing_sleep.remove(after.tags)

    @contextmanager
    def changing_lora(self, lora_name: str) -> Iterator[None]:
        """While replicas load another adapter of this name one by one: what was loaded before is still written down,
        and is not brought to any replica. For the caller that has the turn of the name."""
        self._changing_loras.add(lora_name)
        try:
            yield
        finally:
            self._changing_loras.remove(lora_name)

    @property
    def loras_to_load(self) -> dict[str, str]:
        """Those of `loras` that a replica is to load which lacks them."""
        return {name: path for name, path in self.loras.items() if name not in self._changing_loras}

    @property
    def loras_to_bring(self) -> dict[str, str]:
        """Those of `pushed_loras` that a replica is to get which lacks them."""
        return {name: push_id for name, push_id in self.pushed_loras.items() if name not in self._changing_loras}

    def issue(self) -> int:
        """The epoch of a change that may yet fail. Each is issued once."""
        if not self._life or self.issued // EPOCHS_PER_S != self._life:
            self._begin_life()
        self.issued += 1
        return self.issued

    def change(self, epoch: int = 0) -> None:
        """It has changed, by what this epoch was issued for; 0 = none was. If another change, or the record of another
        router, came between, a new one is issued: what holds now is both."""
        self.epoch = epoch if epoch > max(self.epoch, self._issued_at_adopt) else self.issue()
        self.is_own = True

    def begin(self) -> None:
        """No replica keeps a record. Whatever a router has written comes before what this one has found."""
        self.epoch = self.issued = 1

    def adopt(self, record: types_pb2.FleetState) -> None:
        """It is what another router has written down."""
        self.epoch = record.epoch
        self.is_own = False
        self._issued_at_adopt = self.issued
        if record.epoch > self.issued:  # the next change is above all that its router may have issued as well
            self.issued, self._life = record.epoch, 0
        self.asleep = FleetSleep(
            frozenset(record.asleep_tags), record.sleep_level if record.HasField("sleep_level") else None
        )
        self.loras = {lora.lora_name: lora.path for lora in record.loras if lora.path}
        self.pushed_loras = {lora.lora_name: lora.push_id for lora in record.loras if lora.push_id}

    def overtake(self, epoch: int) -> None:
        """Another router has used an epoch above this one: the fleet is what this router says, and has the higher
        epoch."""
        self.issued = max(self.issued, epoch)
        self._begin_life()
        self.change()

    def record(self, epoch: int, version: Version, leases: Iterable[types_pb2.PauseLease]) -> types_pb2.FleetState:
        """The record for the replicas."""
        loras = [types_pb2.FleetLora(lora_name=name, path=path) for name, path in sorted(self.loras.items())]
        pushed = sorted(self.pushed_loras.items())
        loras += [types_pb2.FleetLora(lora_name=name, push_id=push_id) for name, push_id in pushed]
        return types_pb2.FleetState(
            epoch=epoch,
            weight_version=version.number,
            push_id=version.push_id,
            content_digest=version.content_digest,
            base_digest=version.base_digest,
            leases=leases,
            sleep_level=self.asleep.level,
            asleep_tags=sorted(self.asleep.tags),
            loras=loras,
        )

    @contextmanager
    def loading(self, lora_name: str, path: str) -> Iterator[None]:
        """While replicas load an adapter from a directory. Raises InvalidFieldError if none of this length can be
        written down with the others, and with those that are being loaded, whether these succeed or fail."""
        sizes: Counter[str] = Counter()
        for name, each in (*self.loras.items(), *self._loading.items(), (lora_name, path)):
            sizes[name] = max(sizes[name], types_pb2.FleetLora(lora_name=name, path=each).ByteSize())
        if (size_bytes := sizes.total()) > MAX_LORAS_BYTES:
            raise InvalidFieldError.of(
                "path",
                f"is too long: the names and paths of {len(sizes)} adapters have {size_bytes} bytes, and the record of "
                f"a fleet takes {MAX_LORAS_BYTES}: unload one, or name a shorter path",
            )
        self._loading[lora_name] = path
        try:
            yield
        finally:
            del self._loading[lora_name]

    def _begin_life(self) -> None:
        """From now on epochs are above all that are known, also if clocks are wrong."""
        self._life = max(self._started_s, self.issued // EPOCHS_PER_S + 1)
        self._first = self.issued = self._life * EPOCHS_PER_S + self._mark * _MARKED
