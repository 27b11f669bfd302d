"""Fetches a version for a push: from one source after the other, each for what is still missing.

The push is one like any other: the registry checks its manifest, its bytes and its version, and applies all or nothing.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from genserve.control.arguments import check_text
from genserve.errors import (
    ChecksumMismatchError,
    FieldViolation,
    InvalidFieldError,
    PeersFailedError,
    PushConflictError,
    PushNotFoundError,
    PushTruncatedError,
)
from genserve.tensors.ranges import Range
from genserve.weights.load.checkpoint_source import CheckpointSource
from genserve.weights.load.types import CheckpointPath, Load, Offer, Peers, SourceError, WeightSource
from genserve.weights.push.stream import until_expired
from genserve.weights.push.types import PushAction, PushHeader, PushOutcome, PushReport, PushState
from genserve.weights.registry import PushRegistry

MAX_PEERS = 64
_MAX_IDLE_ROUNDS = 3
_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 2.0


class WeightLoader:
    """Carries out LoadWeights. `open_peer` makes the source for an address, and for a push there or ""."""

    def __init__(self, pushes: PushRegistry, open_peer: Callable[[str, str], WeightSource]) -> None:
        self._pushes = pushes
        self._open_peer = open_peer

    async def load(self, load: Load) -> PushOutcome:
        """Fetches a version and carries out the push. If the caller is cancelled, the bytes stay staged, and the next
        call continues. A repeat for an applied push gets its outcome.

        Raises InvalidFieldError for a source that cannot be, PeersFailedError if no peer sends what is missing,
        ChecksumMismatchError if none has the contents that the digest names, and as `PushRegistry.open` and
        `PushStream.finish`.
        """
        check_text(load.push_id, "push_id")
        sources = self._sources(load.source)
        load = replace(load, push_id=load.push_id or uuid.uuid4().hex)
        known = self._known(load.push_id)
        if known is not None:
            if load.weight_version not in (0, known.push.weight_version):
                raise PushConflictError(
                    f"push {load.push_id!r} exists with version {known.push.weight_version}",
                    metadata={"push_id": load.push_id, "weight_version": str(known.push.weight_version)},
                )
            if known.push.state is PushState.APPLIED:
                return known
            load = replace(load, weight_version=known.push.weight_version)
        return await _Loading(self._pushes, load, sources).run()

    def _known(self, push_id: str) -> PushOutcome | None:
        try:
            return self._pushes.report(push_id)
        except PushNotFoundError:
            return None

    def _sources(self, source: CheckpointPath | Peers) -> list[WeightSource]:
        if isinstance(source, CheckpointPath):
            return [CheckpointSource(source.path)]
        check_text(source.push_id, "peers.push_id")
        if not 1 <= len(source.addresses) <= MAX_PEERS:
            raise InvalidFieldError.of("peers.addresses", f"must have 1 to {MAX_PEERS}, has {len(source.addresses)}")
        for index, address in enumerate(source.addresses):
            check_text(address, f"peers.addresses[{index}]")
            if not address:
                raise InvalidFieldError.of(f"peers.addresses[{index}]", "is empty")
        return [self._open_peer(address, source.push_id) for address in source.addresses]


class _Loading:
    """One load. Its sources are asked in turns until one has sent the last byte.

    A source goes on where another one has stopped if it names the same bytes. Others have their turn when none of those
    brings anything any more, and bring everything.
    """

    def __init__(self, pushes: PushRegistry, load: Load, sources: Sequence[WeightSource]) -> None:
        self._pushes = pushes
        self._load = load
        self._sources = sources
        report = self._report()
        self._attempt = "" if report is None else report.attempt
        """Whose bytes count; "" = those of any source."""
        self._failures: dict[str, str] = {}
        self._bringers: set[str] = set()
        self._liars: set[str] = set()
        self._mixes = True
        """Whether one source may go on where another one has stopped; not after that has made wrong contents."""

    async def run(self) -> PushOutcome:
        """Raises as `WeightLoader.load`."""
        num_idle, delay_s = 0, _FIRST_DELAY_S
        while num_idle < _MAX_IDLE_ROUNDS and len(self._liars) < len(self._sources):
            num_idle += 1
            for source in self._sources:
                if source.name not in self._liars:
                    before = self._num_received()
                    try:
                        return await self._fetch(source)
                    except (SourceError, ChecksumMismatchError) as error:
                        self._note(source, error)
                    if self._num_received() > before:
                        num_idle, delay_s = 0, _FIRST_DELAY_S
                    elif num_idle > 1:
                        self._attempt = ""  # nobody goes on with it: the next source may begin anew
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
        raise self._error()

    async def _fetch(self, source: WeightSource) -> PushOutcome:
        load = self._load
        async with source.open(self._missing(), load.weight_version) as offer:
            if load.content_digest and offer.content_digest not in ("", load.content_digest):
                raise SourceError(f"it has other contents: their digest is {offer.content_digest}")
            attempt = offer.identity or f"load {uuid.uuid4().hex}"
            if self._attempt not in ("", attempt):
                raise SourceError("nothing says that it has the bytes of which some are here")
            with _naming_fields():
                stream = await self._pushes.open(self._header(offer, attempt))
            # The next source must have the same version.
            load = self._load = replace(load, weight_version=load.weight_version or offer.weight_version)
            self._attempt = attempt if offer.identity else ""
            try:
                if load.action is not PushAction.VALIDATE:
                    self._bringers.add(source.name)
                    async with until_expired(stream):
                        await offer.send(stream)
                return await stream.finish()
            except PushTruncatedError as error:
                raise SourceError(error.message) from None
            finally:
                stream.detach()

    def _header(self, offer: Offer, attempt: str) -> PushHeader:
        load = self._load
        return PushHeader(
            push_id=load.push_id,
            weight_version=load.weight_version or offer.weight_version,
            expected_version=load.expected_version,
            manifest=offer.manifest,
            action=load.action,
            apply=load.apply,
            staging_ttl_s=load.staging_ttl_s,
            prepared_ttl_s=load.prepared_ttl_s,
            force=load.force,
            attempt=attempt,
            content_digest=load.content_digest or offer.content_digest,
        )

    def _report(self) -> PushReport | None:
        try:
            return self._pushes.report(self._load.push_id).push
        except PushNotFoundError:
            return None

    def _missing(self) -> tuple[Range, ...] | None:
        """What the attempt lacks; None = everything."""
        report = self._report()
        return report.missing if report is not None and report.attempt == self._attempt != "" else None

    def _num_received(self) -> int:
        report = self._report()
        return 0 if report is None else report.received_bytes

    def _note(self, source: WeightSource, error: SourceError | ChecksumMismatchError) -> None:
        """A source has failed. Contents that differ from their digest are thrown away: the source is wrong if it has
        brought all of them, and otherwise none may go on where another one has stopped any more."""
        self._failures[source.name] = str(error)
        if isinstance(error, ChecksumMismatchError):
            if self._bringers == {source.name}:
                self._liars.add(source.name)
            self._mixes = False
        if not self._mixes:
            self._attempt = ""
            self._bringers.clear()
            with suppress(PushNotFoundError):
                self._pushes.discard(self._load.push_id)

    def _error(self) -> PeersFailedError | ChecksumMismatchError:
        about = "; ".join(f"{name}: {failure}" for name, failure in self._failures.items())
        metadata = {"push_id": self._load.push_id}
        if self._liars:
            return ChecksumMismatchError(f"no source has the contents of the digest: {about}", metadata=metadata)
        return PeersFailedError(f"no peer sends the version: {about}", metadata=metadata)


@contextmanager
def _naming_fields() -> Iterator[None]:
    """A header's fields are those of the request."""
    try:
        yield
    except InvalidFieldError as error:
        violations = [FieldViolation(each.field.removeprefix("header."), each.description) for each in error.violations]
        raise InvalidFieldError(error.message.removeprefix("header."), violations=violations) from None
