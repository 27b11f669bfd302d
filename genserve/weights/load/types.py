"""Versions to fetch, and their sources."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from genserve.control.membership import FleetCommit
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range
from genserve.weights.push.stream import PushStream
from genserve.weights.push.types import DEFAULT_PREPARED_TTL_S, DEFAULT_STAGING_TTL_S, ApplyOptions, PushAction


class SourceError(Exception):
    """A source does not have the version, or does not go on to send it; another one may. The message says why."""


class SourceSilentError(SourceError):
    """A source has the version and sends nothing more of it: perhaps its own sender pauses."""


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """A directory of the daemon's host with safetensors files, or one such file."""

    path: str


@dataclass(frozen=True, slots=True)
class Peers:
    """Other daemons, in order of preference. `push_id` names a push of theirs; "" = the version that they serve."""

    addresses: tuple[str, ...]
    push_id: str = ""


@dataclass(frozen=True, slots=True)
class Previous:
    """The version before the served one, as it is kept on the daemon's disk."""


@dataclass(frozen=True, slots=True)
class Load:
    """A version to fetch. The fields are those of a push's header, except for `source`; `weight_version` 0 = the one
    that the peers have, or the previous one."""

    source: CheckpointPath | Peers | Previous
    push_id: str = ""
    weight_version: int = 0
    expected_version: int | None = None
    force: bool = False
    action: PushAction = PushAction.APPLY
    apply: ApplyOptions = field(default_factory=ApplyOptions)
    staging_ttl_s: float = DEFAULT_STAGING_TTL_S
    prepared_ttl_s: float = DEFAULT_PREPARED_TTL_S
    content_digest: str = ""
    preemptible: bool = False
    fleet: FleetCommit | None = None


class Offer(Protocol):
    """A version that a source has. `weight_version` 0 = it has no number. Sources with the same `identity` have the
    same bytes, so that one can go on where another has stopped; "" = nothing is known about this. So do other daemons
    with the same `origin`, "" = it is this daemon. `content_digest` "" = unknown."""

    @property
    def weight_version(self) -> int:
        """The number of the version."""

    @property
    def manifest(self) -> Manifest:
        """Its tensors."""

    @property
    def identity(self) -> str:
        """Equal for sources with the same bytes."""

    @property
    def origin(self) -> str:
        """As `LivePush.origin`."""

    @property
    def content_digest(self) -> str:
        """The digest of its contents."""

    async def send(self, stream: PushStream) -> None:
        """Writes the bytes that were asked for to `stream`, and returns when the source has confirmed its version.
        Raises SourceError, and as `PushStream.write`."""


class WeightSource(Protocol):
    """A place to fetch a version from."""

    @property
    def name(self) -> str:
        """For people."""

    def open(self, missing: tuple[Range, ...] | None, weight_version: int) -> AbstractAsyncContextManager[Offer]:
        """Asks for the `missing` byte ranges; None = all. If none is missing, for the confirmation only. Raises
        SourceError, also if the source has another version than `weight_version`; 0 = any."""
