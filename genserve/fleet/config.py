"""Settings of a router. The defaults of its flags are these; the module loads neither gRPC nor the router."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

from genserve.fleet.settings import FleetSettings
from genserve.net.addresses import DEFAULT_ROUTER, check_replica, split_name
from genserve.routing.names import DEFAULT_POLICIES, parse_policies
from genserve.routing.policies.prefix_aware import OVERLOAD_THRESHOLD
from genserve.settings.config import MAX_TIMEOUT_S, WRITE_TIMEOUT_S
from genserve.settings.flags import setting
from genserve.settings.listen_config import ListenConfig

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
