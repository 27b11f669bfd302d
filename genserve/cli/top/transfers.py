"""How fast pushes in flight arrive, from what was told of them at several times. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from genserve.client import PushInFlight

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
        """How many bytes have arrived since it was told last."""
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
    """The pushes that were told last, at most `MAX_SHOWN`. `arrived_bytes`: of all pushes since the beginning."""

    def __init__(self) -> None:
        self._by_id: dict[str, Transfer] = {}
        self.arrived_bytes = 0

    def told(self, pushes: Sequence["PushInFlight"], means: Iterable[float | None], now_s: float) -> list[Transfer]:
        """Takes what was told, with the mean rate of each, and returns those that are not listed any more."""
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
        """In the order in which they were told."""
        return list(self._by_id.values())
