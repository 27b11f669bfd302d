"""How a router watches its replicas, and what it allows."""

from dataclasses import dataclass

from genserve.settings.config import MAX_TIMEOUT_S
from genserve.wire.bounds import MAX_REPLICAS


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Times in seconds.

    `heartbeat_s`: how often a replica says that it is there. `report_interval_s`: how often it looks whether it
    has something new to report. `connect_timeout_s`: how long the first call to it may take. `silence_s`: without a
    word for so long it is unhealthy.
    `settle_s`: how long the router waits for all of its replicas, from the first answer after its start on, before it
    tells the version of the fleet from those that have answered.
    `wait_ready_s`: how long a request waits for a replica that may serve it.
    `fanout`: how many replicas one replica sends a push on to. `min_replicas`: how many have to take a push, 0 = all.
    `straggler_s`: when enough have a push, how long it waits for the next one to have it.
    """

    heartbeat_s: float = 0.5
    report_interval_s: float = 0.25
    silence_s: float = 5.0
    connect_timeout_s: float = 10.0
    settle_s: float = 10.0
    wait_ready_s: float = 60.0
    fanout: int = 1
    min_replicas: int = 0
    straggler_s: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.fanout <= MAX_REPLICAS:
            raise ValueError(f"--fanout must be in [1, {MAX_REPLICAS}], is {self.fanout}")
        if not 0 <= self.min_replicas <= MAX_REPLICAS:
            raise ValueError(f"--min-replicas must be in [0, {MAX_REPLICAS}], is {self.min_replicas}")
        if not self.silence_s > self.heartbeat_s:
            raise ValueError(f"--silence must be above {self.heartbeat_s:g} s, is {self.silence_s:g}")
        for name, value in (("--settle", self.settle_s), ("--wait-ready", self.wait_ready_s)):
            if not 0 <= value <= MAX_TIMEOUT_S:
                raise ValueError(f"{name} must be in [0, {MAX_TIMEOUT_S:g}] s, is {value:g}")
