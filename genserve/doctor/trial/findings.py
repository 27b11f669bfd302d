"""What was found of a daemon that was pushed to."""

from dataclasses import dataclass, field
from typing import Any

Digests = dict[tuple[str, str], str]
"""SHA-256 by (rank, name of the tensor in the engine)."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a daemon said under checkpoint `name`: greedy tokens of a few prompts, whether all were labelled with the
    version that was served, and digests of what its workers hold (empty when not asked for)."""

    name: str
    tokens: tuple[tuple[int, ...], ...]
    labelled: bool
    digests: Digests


@dataclass(frozen=True, slots=True)
class PushFound:
    """One push under load. Times in seconds; `waits_s` are those between tokens of a stream while it was received and
    prepared. `shared` says why shared memory could not be used, "" if it was, None if bytes were to be sent.
    `lost` says why a stream ended, "" if all went on."""

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
    """A push that must fail. `reason` is the error's, "" when it was applied; `after` is what was served then, None
    when that is not known."""

    reason: str
    message: str
    before: Snapshot
    after: Snapshot | None


@dataclass(slots=True)
class WayFound:
    """One daemon, which was started on checkpoint `started_on`. `error` says why its checks ended early; what was found
    before is there. `stopped` is what was wrong about its end, None when it was not stopped in order."""

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
