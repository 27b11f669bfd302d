"""Settings of a router. The defaults of its flags are these; the module loads neither gRPC nor the rest of a router."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

from genserve.net import DEFAULT_ROUTER, check_replica, split_name
from genserve.routing.names import DEFAULT_POLICIES, parse_policies
from genserve.routing.prefix_aware import OVERLOAD_THRESHOLD
from genserve.settings.config import MAX_TIMEOUT_S, WRITE_TIMEOUT_S
from genserve.settings.flags import setting
from genserve.settings.listen_config import ListenConfig
from genserve.wire.bounds import MAX_REPLICAS


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """How a router watches its replicas, and what it allows. Times in seconds.

    `heartbeat_s`: how often a replica says that it is there. `report_interval_s`: how often it looks whether it
    has something new to report. `connect_timeout_s`: how long the first call to it may take. `silence_s`: without a
    word for so long it is unhealthy.
    `settle_s`: how long the router waits for all of its replicas, from the first answer after its start on, and anew if
    it has none left, before it tells the version of the fleet from those that have answered.
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


_, _DEFAULT_PORT = split_name(DEFAULT_ROUTER)


@dataclass(frozen=True, slots=True)
class RouteConfig(ListenConfig):
    """Where a router listens, and its replicas. `dns`: NAME:PORT of each name to resolve."""

    replicas: Sequence[str] = ()
    dns: Sequence[str] = ()
    policies: str = DEFAULT_POLICIES
    overload_threshold: float = OVERLOAD_THRESHOLD
    drain_timeout_s: float = 30.0
    write_timeout_s: float = WRITE_TIMEOUT_S
    fleet: FleetSettings = field(default_factory=FleetSettings)
    _: KW_ONLY
    port: int = setting(_DEFAULT_PORT, "TCP port to listen on; 0 picks a free one, -1 listens only on --uds")
    max_message_bytes: int = setting(
        256 << 20, "limit of the size of a message, in bytes; each replica has its own, which is smaller"
    )

    def __post_init__(self) -> None:
        ListenConfig.__post_init__(self)  # `super()` does not find its class among those with slots
        if not self.overload_threshold >= 1:
            raise ValueError(f"--overload-threshold must be at least 1, is {self.overload_threshold:g}")
        for address in self.replicas:
            with _naming("--replica"):
                check_replica(address)
        for name in self.dns:
            with _naming("--dns"):
                split_name(name)
        with _naming("--policy"):
            parse_policies(self.policies)
        if len(set(self.replicas)) < len(self.replicas):
            raise ValueError("--replica names the same address twice")
        for flag, time_s in (("--drain-timeout", self.drain_timeout_s), ("--write-timeout", self.write_timeout_s)):
            if not 0 <= time_s <= MAX_TIMEOUT_S:
                raise ValueError(f"{flag} must be in [0, {MAX_TIMEOUT_S:g}] s, is {time_s:g}")


@contextmanager
def _naming(flag: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
