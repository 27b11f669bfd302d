"""What a trial found out about a daemon. Also the digests of what its workers hold, and whether a push replaced
all of it.

This is the one place that asks a daemon for digests. A tensor that a push did not replace has the digest of the
previous version, or the workers refuse it when the daemon starts.
"""

from dataclasses import dataclass, field
from typing import Any

from genserve.client import AsyncClient

Digests = dict[tuple[str, str], str]
"""SHA-256 by (rank, name of the tensor in the engine)."""

_NUM_NAMED = 5


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


async def held_weights(client: AsyncClient, timeout_s: float) -> Digests:
    """Digests of all tensors that the workers hold for the model, read from the devices. Raises GenserveError."""
    served = await client.get_weights(include_digests=True, timeout_s=timeout_s)
    return served.digests


@dataclass(frozen=True, slots=True)
class DigestDiff:
    """How `pushed` differs from a cold start, by "rank name"."""

    num_held: int
    stale: tuple[str, ...]
    missing: tuple[str, ...]
    extra: tuple[str, ...]

    @classmethod
    def of(cls, cold: Digests, pushed: Digests) -> "DigestDiff":
        """Compares two sets of digests, which are of the same checkpoint."""
        stale = [key for key, digest in cold.items() if key in pushed and pushed[key] != digest]
        return cls(
            num_held=len(cold),
            stale=_names(stale),
            missing=_names(cold.keys() - pushed.keys()),
            extra=_names(pushed.keys() - cold.keys()),
        )

    @property
    def differs(self) -> bool:
        """Whether there is a difference."""
        return bool(self.stale or self.missing or self.extra)

    def words(self) -> str:
        """The first few differences of each kind."""
        kinds = {"other values in": self.stale, "gone is": self.missing, "new is": self.extra}
        return "; ".join(f"{what} {_some(names)}" for what, names in kinds.items() if names)


def _names(keys: "list[tuple[str, str]] | set[tuple[str, str]]") -> tuple[str, ...]:
    return tuple(sorted(f"{rank} {name}" for rank, name in keys))


def _some(names: tuple[str, ...]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
