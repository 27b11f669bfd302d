"""What both commands say about Ray, what the router's process and the one that talks to Ray tell each other, and the
names by which a router finds replicas."""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import IO, Final, Self

from genserve.errors import ReplicaNotFoundError
from genserve.settings.config import MAX_TIMEOUT_S

DEFAULT_NAME: Final = "genserve"
DEFAULT_TIMEOUT_S: Final = 60.0
AUTO: Final = "auto"
"""The address with which Ray looks for a cluster itself: $RAY_ADDRESS, or the one that this host is a node of."""
_PREFIX: Final = "replica-"


@dataclass(frozen=True, slots=True)
class RayConfig:
    """`name`: of the fleet, to distinguish those of one cluster. `timeout_s`: for Ray to answer and to place all
    replicas."""

    address: str = AUTO
    name: str = DEFAULT_NAME
    timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.address.startswith("ray://"):
            raise ValueError(
                f"--ray {self.address}: Ray Client cannot be used: run this on a node of the cluster, and give the "
                "address without ray:// and with the port of `ray start` (6379)"
            )
        if self.address != AUTO and re.fullmatch(r"[^\s/]+:[0-9]{1,5}", self.address) is None:
            raise ValueError(f"--ray must be HOST:PORT of a cluster's head, is {self.address!r}")
        if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.name) is None:
            raise ValueError(f"--ray-name must be 1 to 64 letters, digits, '.', '_' or '-', is {self.name!r}")
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"--ray-timeout must be in (0, {MAX_TIMEOUT_S:g}] s, is {self.timeout_s:g}")

    @property
    def where(self) -> str:
        """For people."""
        return "Ray" if self.address == AUTO else f"Ray at {self.address}"


@dataclass(frozen=True, slots=True)
class RayFleet:
    """The replicas that `up` wants. `flags` are those of each daemon, without where it listens. `cpus` and `gpus` are
    those of one replica. `is_open`: daemons may listen where other hosts reach them. `start_timeout_s`: as
    UpConfig has it. `stop_timeout_s`: how long a daemon may take to end."""

    num_replicas: int
    flags: Sequence[str]
    cpus: int
    gpus: int
    is_open: bool
    start_timeout_s: float
    stop_timeout_s: float


@dataclass(frozen=True, slots=True)
class Task:
    """The task of the process that talks to Ray. `fleet` None: find the replicas of a fleet that runs."""

    ray: RayConfig
    fleet: RayFleet | None = None

    def to_json(self) -> str:
        """The task, as an argument of the process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The task of `to_json`."""
        fields = json.loads(text)
        fleet = fields["fleet"]
        return cls(RayConfig(**fields["ray"]), None if fleet is None else RayFleet(**fleet))


def namespace_of(fleet: str) -> str:
    """Where the actors of a fleet have their names: each fleet has a namespace of Ray's to itself."""
    return f"genserve-{fleet}"


def actor_name(number: int) -> str:
    """The name of the actor of a replica."""
    return f"{_PREFIX}{number}"


def replica_number(name: str) -> int | None:
    """The number of the replica whose actor has this name; None for any other actor."""
    digits = name.removeprefix(_PREFIX)
    return int(digits) if name.startswith(_PREFIX) and digits.isascii() and digits.isdecimal() else None


class ServingAddresses:
    """The replicas that serve; written as they change. Members of a fleet."""

    def __init__(self, to: IO[bytes]) -> None:
        self._to = to
        self._known: set[str] = set()

    def add(self, address: str) -> None:
        """One serves."""
        self.put({*self._known, address})

    async def remove(self, address: str) -> None:
        """One serves no more. Raises ReplicaNotFoundError."""
        if address not in self._known:
            raise ReplicaNotFoundError(f"no replica {address!r} belongs to the fleet")
        self.put(self._known - {address})

    def put(self, addresses: Iterable[str]) -> None:
        """These are all. The first call tells that the fleet is there, whoever serves in it."""
        self._known = set(addresses)
        with suppress(OSError):  # the router has ended, and this process is about to be told
            self._to.write(json.dumps(sorted(self._known)).encode() + b"\n")
            self._to.flush()


def addresses_of(line: bytes) -> frozenset[str]:
    """The addresses of a line."""
    return frozenset(json.loads(line))
