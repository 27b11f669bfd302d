"""Settings of a router. The defaults of its flags are these; the module loads neither gRPC nor the router."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from genserve.addresses import DEFAULT_ROUTER, check_replica, is_loopback, split_name
from genserve.config import MAX_TIMEOUT_S
from genserve.fleet.settings import FleetSettings
from genserve.log_lines import FORMATS, TEXT
from genserve.routing.names import DEFAULT_POLICIES, parse_policies
from genserve.routing.policies.prefix_aware import OVERLOAD_THRESHOLD

_DEFAULT_HOST, _DEFAULT_PORT = split_name(DEFAULT_ROUTER)


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """Where a router listens, and its replicas. `dns`: NAME:PORT of each name to resolve."""

    replicas: Sequence[str] = ()
    dns: Sequence[str] = ()
    host: str = _DEFAULT_HOST
    port: int = _DEFAULT_PORT
    uds: str = ""
    metrics_port: int = -1
    log_format: str = TEXT
    channelz: bool = False
    allow_insecure: bool = False
    policies: str = DEFAULT_POLICIES
    overload_threshold: float = OVERLOAD_THRESHOLD
    drain_timeout_s: float = 30.0
    fleet: FleetSettings = field(default_factory=FleetSettings)

    def __post_init__(self) -> None:
        if not -1 <= self.port <= 65535:
            raise ValueError(f"--port must be in [-1, 65535], is {self.port}")
        if self.port == -1 and not self.uds:
            raise ValueError("--port -1 listens only on a Unix socket: pass --uds too")
        if not -1 <= self.metrics_port <= 65535:
            raise ValueError(f"--metrics-port must be in [-1, 65535], is {self.metrics_port}")
        if self.metrics_port == self.port > 0:
            raise ValueError(f"--metrics-port must not be the port of gRPC (--port), is {self.metrics_port} too")
        listens_on_tcp = (self.port, self.metrics_port) != (-1, -1)
        if listens_on_tcp and not self.allow_insecure and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} can be reached from other hosts, without encryption or authentication: "
                "listen on 127.0.0.1 or --uds, or pass --allow-insecure"
            )
        if self.log_format not in FORMATS:
            raise ValueError(f"--log-format must be one of {', '.join(FORMATS)}, is {self.log_format!r}")
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
        if not 0 <= self.drain_timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"--drain-timeout must be in [0, {MAX_TIMEOUT_S:g}] s, is {self.drain_timeout_s:g}")


@contextmanager
def _naming(flag: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None
