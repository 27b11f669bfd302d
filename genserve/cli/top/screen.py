"""What the screen shows: the last report, its history, how fast pushes in flight arrive, and what became of the
user's commands.

Pure: times are given by the caller, in seconds of a clock that never goes back, and nothing here asks anybody.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Final

from genserve.cli.quantities import mean_rate
from genserve.cli.top.lines import Tone
from genserve.cli.top.questions import Question

if TYPE_CHECKING:
    from genserve.client import PushInFlight, PushResult, Replicas, ServerInfo, Status


WINDOW_S: Final = 2.0
MAX_SHOWN: Final = 16
_MAX_POINTS: Final = 64


@dataclass(slots=True)
class Transfer:
    """One push. `points`: (seconds, received bytes) of the last `WINDOW_S`. `mean`: bytes per second over all of its
    attempt, kept once it is received."""

    push: "PushInFlight"
    points: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MAX_POINTS))
    mean: float | None = None

    def told(self, push: "PushInFlight", now_s: float) -> int:
        """Bytes that have arrived since the last report."""
        before = self.points[-1][1] if self.points else 0
        if push.received_bytes < before:  # a new attempt
            self.points.clear()
            self.mean = None
            before = 0
        self.push = push
        self.points.append((now_s, push.received_bytes))
        while len(self.points) > 2 and self.points[1][0] <= now_s - WINDOW_S:
            self.points.popleft()
        return push.received_bytes - before

    @property
    def rate(self) -> float | None:
        """Bytes per second now; of one that is received, over all of the time that it took. None = not known yet."""
        if self.push.state != "receiving":
            return self.mean
        if len(self.points) < 2 or self.points[-1][0] <= self.points[0][0]:
            return self.mean
        (first_s, first), (last_s, last) = self.points[0], self.points[-1]
        return (last - first) / (last_s - first_s)


class Transfers:
    """The pushes of the last report, at most `MAX_SHOWN`. `arrived_bytes`: of all pushes since the beginning."""

    def __init__(self) -> None:
        self._by_id: dict[str, Transfer] = {}
        self.arrived_bytes = 0

    def told(self, pushes: Sequence["PushInFlight"], means: Iterable[float | None], now_s: float) -> list[Transfer]:
        """Takes a report, with the mean rate of each push, and returns those that are not listed any more."""
        shown = list(pushes)[:MAX_SHOWN]
        gone = [self._by_id.pop(push_id) for push_id in self._by_id.keys() - {push.push_id for push in shown}]
        for push, mean in zip(shown, means, strict=False):
            transfer = self._by_id.get(push.push_id)
            is_new = transfer is None
            if transfer is None:
                transfer = self._by_id[push.push_id] = Transfer(push)
            arrived = transfer.told(push, now_s)
            if not is_new or push.state == "receiving":  # of one that was staged long ago nothing arrives
                self.arrived_bytes += arrived
            if push.state == "receiving" and mean is not None:
                transfer.mean = mean
        order = {push.push_id: place for place, push in enumerate(shown)}
        self._by_id = dict(sorted(self._by_id.items(), key=lambda item: order[item[0]]))
        return gone

    def ended(self, transfer: Transfer) -> None:
        """A push that is gone was applied: the rest of its bytes has arrived as well."""
        received = transfer.points[-1][1] if transfer.points else 0
        self.arrived_bytes += max(0, transfer.push.total_bytes - received)

    @property
    def shown(self) -> list[Transfer]:
        """In the order of the report."""
        return list(self._by_id.values())


MAX_SAMPLES: Final = 512

_MAX_NOTES: Final = 20
_MAX_ENDED: Final = 4
_MAX_LEASES: Final = 16


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured at one time. None = not known then: nobody answered."""

    tokens_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    prefix_hit_rate: float | None = None
    pushed_bytes_per_s: float | None = None


class History:
    """The last `MAX_SAMPLES` samples, oldest first."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: Sample) -> None:
        """Adds the newest one."""
        self._samples.append(sample)

    def of(self, name: str) -> list[float | None]:
        """One field of all samples."""
        return [getattr(sample, name) for sample in self._samples]


class LinkState(Enum):
    """Whether what is shown is so now."""

    CONNECTING = "connecting"
    LIVE = "live"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Link:
    """The connection. `reason`: why it is lost."""

    state: LinkState
    since_s: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Note:
    """An event, for the user."""

    text: str
    tone: Tone
    at_s: float


@dataclass(frozen=True, slots=True)
class EndedPush:
    """A push that was shown and is over. `result` is None if nobody knows of it any more."""

    transfer: Transfer
    result: "PushResult | None"


class Screen:
    """The state of the screen. `target`: the address that is shown. `now_s`: the time now. `pause_ttl_s`: the length
    of a pause that the user takes."""

    def __init__(self, target: str, now_s: float, pause_ttl_s: float = 60.0) -> None:
        self.target = target
        self.pause_ttl_s = pause_ttl_s
        self.link = Link(LinkState.CONNECTING, now_s)
        self.status: Status | None = None
        self.info: ServerInfo | None = None
        self.replicas: Replicas | None = None
        self.replicas_problem = ""
        self.is_router = False
        self.history = History()
        self.transfers = Transfers()
        self.ended: deque[EndedPush] = deque(maxlen=_MAX_ENDED)
        self.notes: deque[Note] = deque(maxlen=_MAX_NOTES)
        self.question: Question | None = None
        self.pending: list[str] = []
        self.refused: set[str] = set()
        self.own_leases: deque[str] = deque(maxlen=_MAX_LEASES)
        self.version_since_s = now_s
        self.saw_version_begin = False
        self._told_at_s = now_s
        self._told_time: datetime | None = None
        self._sampled_at_s = now_s
        self._sampled_bytes = 0
        self._selected = ""

    # --- what was told

    def took_status(self, status: "Status", now_s: float, here: datetime) -> list[Transfer]:
        """Takes a status; `here` is the time of this machine, which is used if the daemon does not send its own.
        Returns the pushes that are not in flight any more."""
        before = self.status
        if before is None or before.state.instance_id != status.state.instance_id:
            if before is not None:
                self.note("it has restarted", Tone.WARN, now_s)
            self.version_since_s, self.saw_version_begin = now_s, False
        elif before.state.weight_version != status.state.weight_version:
            self.version_since_s, self.saw_version_begin = now_s, True
        if self.link.state is not LinkState.LIVE:
            self.link = Link(LinkState.LIVE, now_s)
        self.status = status
        self._told_at_s = now_s
        self._told_time = here if status.time is None else status.time
        means = [mean_rate(push.received_bytes, push.begin_time, self._told_time) for push in status.pushes]
        return self.transfers.told(status.pushes, means, now_s)

    def took_replicas(self, replicas: "Replicas") -> None:
        """Takes the replicas of a router."""
        self.is_router, self.replicas, self.replicas_problem = True, replicas, ""

    def took_info(self, info: "ServerInfo | None") -> None:
        """Takes what is served; None if it is unknown."""
        self.info = info

    @property
    def is_daemon(self) -> bool:
        """Whether what answers is known to be a daemon. False also while that is not known."""
        return self.info is not None and "fleet" not in self.info.features and not self.is_router

    def has_no_replicas(self) -> None:
        """It is a daemon."""
        self.is_router, self.replicas, self.replicas_problem = False, None, ""

    def lost(self, reason: str, now_s: float) -> None:
        """Nobody answers any more, or the answer was a refusal."""
        since_s = self.link.since_s if self.link.state is LinkState.LOST else now_s
        self.link = Link(LinkState.LOST, since_s, reason)

    def push_ended(self, transfer: Transfer, result: "PushResult | None") -> None:
        """The outcome of a push that is no longer in flight."""
        if result is not None and result.applied is not None:
            self.transfers.ended(transfer)
        self.ended.appendleft(EndedPush(transfer, result))

    def sample(self, now_s: float) -> None:
        """Adds what is known now to the history: call it at even times."""
        elapsed_s = now_s - self._sampled_at_s
        arrived = self.transfers.arrived_bytes - self._sampled_bytes
        self._sampled_at_s, self._sampled_bytes = now_s, self.transfers.arrived_bytes
        if self.status is None or self.link.state is not LinkState.LIVE:
            self.history.add(Sample())
            return
        load = self.status.load
        self.history.add(
            Sample(
                load.tokens_per_second,
                load.running,
                load.waiting,
                load.kv_usage,
                load.prefix_cache_hit_rate,
                arrived / elapsed_s if elapsed_s > 0 else None,
            )
        )

    # --- what follows from it

    def daemon_time(self, now_s: float) -> datetime | None:
        """The server's clock; None before the first answer, and if the time is out of range."""
        if self._told_time is None:
            return None
        try:
            return self._told_time + timedelta(seconds=now_s - self._told_at_s)
        except OverflowError:
            return None

    @property
    def served_version(self) -> int:
        """The newest version that is served anywhere: what a replica may be behind."""
        versions = [0 if self.status is None else self.status.state.weight_version]
        if self.replicas is not None:
            engines = [each.engine for each in self.replicas.replicas]
            versions += [engine.weight_version for engine in engines if engine is not None]
        return max(versions)

    @property
    def newest_version(self) -> int:
        """The newest version that is served anywhere, or on its way."""
        pushes = [] if self.status is None else self.status.pushes
        return max([self.served_version, *(push.weight_version for push in pushes if not push.lora_name)])

    @property
    def addresses(self) -> list[str]:
        """Of the replicas."""
        return [] if self.replicas is None else [each.address for each in self.replicas.replicas]

    @property
    def selected(self) -> str:
        """The replica that is chosen; "" = there is none."""
        addresses = self.addresses
        return self._selected if self._selected in addresses else next(iter(addresses), "")

    def select(self, step: int) -> None:
        """Chooses another replica, so many rows below; stays at the ends."""
        addresses = self.addresses
        if addresses:
            place = addresses.index(self.selected) + step
            self._selected = addresses[min(max(place, 0), len(addresses) - 1)]

    @property
    def held_leases(self) -> list[str]:
        """The leases that were granted here and are held still."""
        held = [] if self.status is None else [lease.lease_id for lease in self.status.state.pauses]
        return [lease_id for lease_id in self.own_leases if lease_id in held]

    # --- what the user does

    def note(self, text: str, tone: Tone, now_s: float) -> None:
        """Shows a line."""
        self.notes.append(Note(text, tone, now_s))
