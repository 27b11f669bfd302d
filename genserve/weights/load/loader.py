"""Fetches a version for a push: from one source after the other, each for what is still missing.

The push is one like any other: the registry checks its manifest, its bytes and its version, and applies all or nothing.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from genserve.aio import Backoff
from genserve.errors import (
    ChecksumMismatchError,
    FieldViolation,
    GenserveError,
    InvalidFieldError,
    ManifestMismatchError,
    PeersFailedError,
    PushConflictError,
    PushNotFoundError,
    PushTruncatedError,
    UnsupportedError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range
from genserve.weights.kept.keeper import Keeper
from genserve.weights.load.checkpoint_source import CheckpointSource
from genserve.weights.load.types import (
    CheckpointPath,
    Load,
    Offer,
    Peers,
    Previous,
    SourceError,
    SourceSilentError,
    WeightSource,
)
from genserve.weights.push.live_pushes import Opening
from genserve.weights.push.stream import PushStream, until_expired
from genserve.weights.push.types import PushAction, PushHeader, PushOutcome, PushReport, PushState
from genserve.weights.push_admission import check_header
from genserve.weights.registry import PushRegistry
from genserve.wire.bounds import MAX_PEERS, check_text

_MAX_IDLE_ROUNDS = 3
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 2.0
_NO_TENSORS = Manifest((), 0)


class WeightLoader:
    """Carries out LoadWeights. `open_peer` makes the source for an address, and for a push there or "". Without a
    `keeper` no version is kept on disk."""

    def __init__(
        self,
        pushes: PushRegistry,
        open_peer: Callable[[str, str], WeightSource],
        keeper: Keeper | None = None,
    ) -> None:
        self._pushes = pushes
        self._open_peer = open_peer
        self._keeper = keeper

    async def load(self, load: Load) -> PushOutcome:
        """Fetches a version and carries out the push. If the caller is cancelled, the bytes stay staged, and the next
        call continues. A repeat for an applied push gets the first answer.

        Raises InvalidFieldError for a source that cannot be, UnsupportedError and NotResidentError if no previous
        version is kept, PeersFailedError if no peer sends what is missing,
        PushNotFoundError if what has arrived is discarded meanwhile, or expires because nothing new comes,
        ChecksumMismatchError if none has the contents that the digest names, and as `PushRegistry.open` and
        `PushStream.finish`.
        """
        load = replace(load, push_id=load.push_id or uuid.uuid4().hex)
        known = self._known(load.push_id)
        is_applied = known is not None and known.push.state is PushState.APPLIED
        if isinstance(load.source, Previous) and not is_applied:
            load = self._of_previous(load)
        with _naming_fields():  # what is wrong later is due to what a source has
            check_header(_header(load, _NO_TENSORS, weight_version=load.weight_version or 1))
        sources = self._sources(load.source)
        if known is not None:
            _check_same(load, known.push)
            if is_applied:  # it has its answer, as that of a commit; and its fleet is told
                return await self._pushes.commit(load.push_id, load.apply, fleet=load.fleet)
            load = replace(load, weight_version=known.push.weight_version)
        with self._pushes.openings.begun(load.push_id) as opening:
            return await _Loading(self._pushes, load, sources, opening).run()

    def _known(self, push_id: str) -> PushOutcome | None:
        try:
            return self._pushes.report(push_id, as_answered=True)
        except PushNotFoundError:
            return None

    def _of_previous(self, load: Load) -> Load:
        if self._keeper is None:
            raise UnsupportedError("the daemon was started without --keep-committed")
        kept = self._keeper.before_served()
        record = kept.record
        if load.weight_version not in (0, record.weight_version):
            raise WeightVersionMismatchError(
                f"the version before the served one is {record.weight_version}, not {load.weight_version}",
                metadata={"weight_version": str(record.weight_version)},
            )
        return replace(
            load,
            source=CheckpointPath(str(kept.path.absolute())),
            weight_version=record.weight_version,
            # A push may be committed while this one is read: the version before would be another one.
            expected_version=self._keeper.served_version if load.expected_version is None else load.expected_version,
            content_digest=load.content_digest or record.content_digest,
        )

    def _sources(self, source: CheckpointPath | Peers | Previous) -> list[WeightSource]:
        if isinstance(source, Previous):
            return []  # a repeat, which gets its answer
        if isinstance(source, CheckpointPath):
            return [CheckpointSource(source.path)]
        check_text(source.push_id, "peers.push_id")
        if not 1 <= len(source.addresses) <= MAX_PEERS:
            raise InvalidFieldError.of("peers.addresses", f"must have 1 to {MAX_PEERS}, has {len(source.addresses)}")
        for index, address in enumerate(source.addresses):
            check_text(address, f"peers.addresses[{index}]")
            if not address:
                raise InvalidFieldError.of(f"peers.addresses[{index}]", "is empty")
        return [self._open_peer(address, source.push_id) for address in dict.fromkeys(source.addresses)]


class _Loading:
    """One load. Its sources are asked in turns until one has sent the last byte.

    A source goes on where another one has stopped if it names the same bytes. Others have their turn when none of those
    brings anything any more, and bring everything.
    """

    def __init__(self, pushes: PushRegistry, load: Load, sources: Sequence[WeightSource], opening: Opening) -> None:
        self._pushes = pushes
        self._opening = opening
        self._load = load
        self._sources = sources
        report = self._report()
        self._attempt = "" if report is None else report.attempt
        """The attempt whose bytes count; "" = those of any source."""
        self._content_digest = load.content_digest
        """Of these bytes; "" = unknown."""
        self._failures: dict[str, str] = {}
        self._unfit: dict[str, GenserveError] = {}
        """Why what a source has cannot be taken, by its name. It is not asked again."""
        self._bringers: set[str] = set()
        self._mixes = True
        """Whether one source may go on where another one has stopped; not after that has made wrong contents."""
        self._began_anew: set[str] = set()
        self._num_before = 0
        self._num_idle_rounds = 0
        self._is_here = False
        """Whether this load has opened the push, which stays until somebody else ends it."""

    async def run(self) -> PushOutcome:
        """Raises as `WeightLoader.load`."""
        backoff, now_s = Backoff(FIRST_DELAY_S, MAX_DELAY_S), asyncio.get_running_loop().time
        until_s = now_s() + self._load.staging_ttl_s
        is_silent = False
        while is_silent or self._num_idle_rounds < _MAX_IDLE_ROUNDS:
            self._num_idle_rounds, is_silent = self._num_idle_rounds + 1, False
            for source in self._sources:
                if source.name in self._unfit:
                    continue
                if now_s() >= until_s:  # peers that do not answer take their time, each
                    raise self._error()
                self._num_before = self._num_received()
                try:
                    return await self._fetch(source)
                except (SourceError, ChecksumMismatchError) as error:
                    self._note(source, error)
                    is_silent |= isinstance(error, SourceSilentError)
                self._check_here()
                if self._num_received() > self._num_before:
                    self._num_idle_rounds = 0
                    backoff.reset()
                    until_s = now_s() + self._load.staging_ttl_s
            if len(self._unfit) == len(self._sources):
                break
            await asyncio.sleep(backoff.next_s())
        raise self._error()

    async def _fetch(self, source: WeightSource) -> PushOutcome:
        async with source.open(self._missing(), self._load.weight_version) as offer:
            if self._goes_on(offer):
                return await self._take(source, offer)
        if self._num_idle_rounds < _MAX_IDLE_ROUNDS or source.name in self._began_anew:
            raise SourceError("nothing says that it has the bytes of which some are here")
        self._began_anew.add(source.name)  # once, because two sources would take turns for ever
        self._begin_anew()
        async with source.open(None, self._load.weight_version) as offer:
            return await self._take(source, offer)

    def _goes_on(self, offer: Offer) -> bool:
        """Whether nothing is lost if these bytes join those that are here."""
        is_same = offer.content_digest == self._content_digest != ""  # and compared at the end
        return is_same or self._attempt in ("", offer.identity)

    def _begin_anew(self) -> None:
        self._attempt, self._content_digest, self._num_before = "", self._load.content_digest, 0

    async def _take(self, source: WeightSource, offer: Offer) -> PushOutcome:
        """Stages what a source sends, and carries out the push when every byte is there."""
        if self._load.content_digest and offer.content_digest not in ("", self._load.content_digest):
            raise SourceError(f"it has other contents: their digest is {offer.content_digest}")
        stream = await self._open(source, offer)
        try:
            if self._load.action is not PushAction.VALIDATE:
                self._bringers.add(source.name)
                async with until_expired(stream):
                    await offer.send(stream)
            return await stream.finish()
        except PushTruncatedError as error:
            raise SourceError(error.message) from None
        finally:
            stream.detach()

    async def _open(self, source: WeightSource, offer: Offer) -> PushStream:
        attempt = self._attempt or offer.identity or f"load {uuid.uuid4().hex}"
        header = replace(
            _header(self._load, offer.manifest, weight_version=self._load.weight_version or offer.weight_version),
            attempt=attempt,
            origin=offer.origin,
            content_digest=self._content_digest or offer.content_digest,
        )
        self._check_here()  # or it would be opened again
        try:
            with _naming_fields():
                stream = await self._pushes.open(header)
        except (InvalidFieldError, ManifestMismatchError, VersionNotNewerError) as error:
            self._unfit[source.name] = error.again()
            raise SourceError(error.message) from None
        self._load = replace(self._load, weight_version=header.weight_version)  # the next source must have the same
        self._attempt = attempt if offer.identity else ""
        self._content_digest = header.content_digest
        self._is_here = self._load.action is not PushAction.VALIDATE
        return stream

    def _report(self) -> PushReport | None:
        try:
            return self._pushes.report(self._load.push_id).push
        except PushNotFoundError:
            return None

    def _missing(self) -> tuple[Range, ...] | None:
        """The byte ranges that the attempt lacks; None = everything."""
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
                self._unfit[source.name] = error.again()
            self._mixes = False
        if not self._mixes:
            self._begin_anew()
            self._bringers.clear()
            self._is_here = False
            with suppress(PushNotFoundError):
                self._pushes.discard(self._load.push_id)

    def _check_here(self) -> None:
        self._pushes.check_open()
        self._opening.check()
        if self._is_here and self._report() is None:
            raise PushNotFoundError(
                f"push {self._load.push_id!r} was discarded, or nothing new came for too long: {self._about()}",
                metadata={"push_id": self._load.push_id},
            )

    def _error(self) -> GenserveError:
        metadata = {"push_id": self._load.push_id}
        if any(isinstance(error, ChecksumMismatchError) for error in self._unfit.values()):
            return ChecksumMismatchError(f"no source has what the digest names: {self._about()}", metadata=metadata)
        if len(self._unfit) == len(self._sources):
            return next(iter(self._unfit.values()))
        return PeersFailedError(f"no peer sends the version: {self._about()}", metadata=metadata)

    def _about(self) -> str:
        return "; ".join(f"{name}: {failure}" for name, failure in self._failures.items())


def _header(load: Load, manifest: Manifest, *, weight_version: int) -> PushHeader:
    """The header of a push that the request asks for."""
    return PushHeader(
        push_id=load.push_id,
        weight_version=weight_version,
        expected_version=load.expected_version,
        manifest=manifest,
        action=load.action,
        apply=load.apply,
        staging_ttl_s=load.staging_ttl_s,
        prepared_ttl_s=load.prepared_ttl_s,
        force=load.force,
        content_digest=load.content_digest,
        preemptible=load.preemptible,
        fleet=load.fleet,
        yields=True,  # a load that meets the trainer's own push must not end it
    )


def _check_same(load: Load, push: PushReport) -> None:
    """Raises PushConflictError unless what is to be loaded can be a push that is here."""
    digests = {load.content_digest, push.content_digest} - {""}
    if push.lora_name or load.weight_version not in (0, push.weight_version) or len(digests) > 1:
        raise PushConflictError(
            f"push {load.push_id!r} exists with version {push.weight_version}, or another digest or an adapter",
            metadata={"push_id": load.push_id, "weight_version": str(push.weight_version)},
        )


@contextmanager
def _naming_fields() -> Iterator[None]:
    """A header's fields are those of the request."""
    try:
        yield
    except InvalidFieldError as error:
        violations = [FieldViolation(each.field.removeprefix("header."), each.description) for each in error.violations]
        raise InvalidFieldError(error.message.removeprefix("header."), violations=violations) from None
