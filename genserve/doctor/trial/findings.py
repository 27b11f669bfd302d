"""What a trial found out about a daemon."""

from dataclasses import dataclass, field
from typing import Any

Digests = dict[tuple[str, str], str]
"""SHA-256 by (rank, name of the tensor in the engine)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The output of a daemon under checkpoint `name`: greedy tokens of a few prompts, whether all were labelled with
    the served version, and digests of what its workers hold (empty if not requested)."""

    name: str
    tokens: tuple[tuple[int, ...], ...]
    labelled: bool
    digests: Digests


@dataclass(frozen=True, slots=True)
class PushFound:
    """One push under load. Times are in seconds. `waits_s` are the times between tokens of a stream while the push was
    received and prepared. `shared` says why shared memory could not be used, "" if it was used, None if bytes were
    requested. `lost` says why a stream ended, "" if all continued."""

    name: str
    step_s: dict[str, float]
    paused_s: float
    requests_kept: int
    requests_aborted: int
    waits_s: list[float]
    idle_waits_s: list[float]
    shared: str | None
    lost: str
    labels_ok: bool


@dataclass(frozen=True, slots=True)
class MustFail:
    """A push that must fail. `reason` is that of the error, "" if it was applied. `after` is what was served then, None
    if unknown."""

    reason: str
    message: str
    before: Snapshot
    after: Snapshot | None


@dataclass(slots=True)
class WayFound:
    """One daemon, which was started on checkpoint `started_on`. `error` says why its checks ended early; earlier
    findings are kept. `stopped` is what was wrong with its end, None if it was not stopped regularly."""

    way: str
    started_on: str
    start_s: float = 0.0
    error: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    cold: Snapshot | None = None
    pushed: list[Snapshot] = field(default_factory=list)
    pushes: list[PushFound] = field(default_factory=list)
    misshapen: MustFail | None = None
    late: MustFail | None = None
    stopped: str | None = None
