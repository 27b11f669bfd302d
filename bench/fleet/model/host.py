"""A host of the model."""

from dataclasses import dataclass, field


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
