"""Digests of what the workers hold, and whether a push replaced all of it.

This is the one place that asks a daemon for digests. A tensor that a push did not replace has the digest of the
previous version, or the workers refuse it when the daemon starts.
"""

from dataclasses import dataclass

from genserve.client import AsyncClient
from genserve.doctor.trial.findings import Digests

_NUM_NAMED = 5


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
