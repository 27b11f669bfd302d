"""Settings of `genserve up`. The defaults of its flags are these; the module loads neither gRPC nor the router."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from genserve.fleet.config import RouteConfig
from genserve.settings.config import MAX_TIMEOUT_S
from genserve.wire.bounds import MAX_REPLICAS

START_TIMEOUT_S: Final = 1800.0
"""Long enough to compile a large model, and to load it from a slow disk."""
CLOSE_S: Final = 30.0
"""Time that a daemon has to end its engine, in addition to the drain timeout."""


@dataclass(frozen=True, slots=True)
class UpConfig:
    """`flags` are those of each daemon, without where it listens and how long it drains, which are ours. `gpus_each`:
    GPUs per replica, None = as many as the flags say. `start_timeout_s`: of each daemon, until it serves."""

    num_replicas: int
    flags: Sequence[str]
    gpus_each: int | None = None
    route: RouteConfig = field(default_factory=RouteConfig)
    start_timeout_s: float = START_TIMEOUT_S

    def __post_init__(self) -> None:
        if not 1 <= self.num_replicas <= MAX_REPLICAS:
            raise ValueError(f"--replicas must be in [1, {MAX_REPLICAS}], is {self.num_replicas}")
        if not 0 < self.start_timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"--start-timeout must be in (0, {MAX_TIMEOUT_S:g}] s, is {self.start_timeout_s:g}")

    @property
    def stop_timeout_s(self) -> float:
        """How long a daemon may take to end."""
        return self.route.drain_timeout_s + CLOSE_S


def flags_of_replica(flags: Sequence[str], number: int) -> list[str]:
    """The flags of all daemons with what one of them must have for itself: a directory beneath --keep-committed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--keep-committed", "--keep_committed", default="")
    directory: str = parser.parse_known_args(list(flags))[0].keep_committed
    own = [f"--keep-committed={Path(directory) / f'replica-{number}'}"] if directory else []
    return [*flags, *own]  # the last one counts
