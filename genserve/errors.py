"""Everything that can go wrong, by the reason the wire contract gives it.

A reason travels as `google.rpc.ErrorInfo.reason` (domain `genserve`): the daemon raises these classes, `rpc.status`
turns them into status codes, and the client raises the same classes again. Imports nothing of ours.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

DOMAIN = "genserve"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field of a request; `field` is its path in the message, as in `google.rpc.BadRequest`."""

    field: str
    description: str


class GenserveError(Exception):
    """Base of all errors that have a reason.

    `violations` name fields or tensors, `retry_after_s` says when to try again (seconds), `metadata` is for programs.
    """

    reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata) if metadata is not None else {}

    def again(self) -> Self:
        """The same error, to be raised anew: one that is kept must not keep the frames that it came through, which may
        hold a large message."""
        return type(self)(
            self.message, violations=self.violations, retry_after_s=self.retry_after_s, metadata=self.metadata
        )


class InvalidFieldError(GenserveError):
    """A field of the request has a value that cannot be served."""

    reason = "INVALID_FIELD"

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidFieldError":
        """The error for one field, named by its path in the message."""
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)])


class PromptTooLongError(GenserveError):
    """The prompt leaves no room for output in the model's context."""

    reason = "PROMPT_TOO_LONG"


class ManifestMismatchError(GenserveError):
    """The manifest does not fit the served checkpoint; the violations name the tensors."""

    reason = "MANIFEST_MISMATCH"


class ChunkOutOfRangeError(GenserveError):
    """A chunk lies outside the manifest's byte space."""

    reason = "CHUNK_OUT_OF_RANGE"


class LoraNotFoundError(GenserveError):
    """No adapter of that name is loaded."""

    reason = "LORA_NOT_FOUND"


class PushNotFoundError(GenserveError):
    """No push of that id is known; it may have timed out."""

    reason = "PUSH_NOT_FOUND"


class UpdateNotFoundError(GenserveError):
    """No weight update of that id is open; it may have timed out, and was undone then."""

    reason = "UPDATE_NOT_FOUND"


class RequestIdInUseError(GenserveError):
    """A request of that id is running."""

    reason = "REQUEST_ID_IN_USE"


class PushConflictError(GenserveError):
    """The push id is taken by a push with another manifest or version."""

    reason = "PUSH_CONFLICT"


class WeightVersionMismatchError(GenserveError):
    """The served version is not the one the request asks for."""

    reason = "WEIGHT_VERSION_MISMATCH"


class VersionNotNewerError(GenserveError):
    """The pushed version is not above the served one."""

    reason = "VERSION_NOT_NEWER"


class PauseLeaseLostError(GenserveError):
    """The pause lease is unknown or has expired."""

    reason = "PAUSE_LEASE_LOST"


class EngineSleepingError(GenserveError):
    """The engine has given its memory back."""

    reason = "ENGINE_SLEEPING"


class NotResidentError(GenserveError):
    """The daemon does not keep the bytes of the served version, which partial pushes and pulls need."""

    reason = "WEIGHTS_NOT_RESIDENT"


class EngineTaintedError(GenserveError):
    """The live weights could not be proven consistent; push a full version or restart."""

    reason = "ENGINE_TAINTED"


class PushTruncatedError(GenserveError):
    """The push ended before every byte was there; what arrived stays staged until its time to live ends."""

    reason = "PUSH_TRUNCATED"


class ApplyInProgressError(GenserveError):
    """Another push or weight update is under way; the metadata names it."""

    reason = "APPLY_IN_PROGRESS"


class PushRolledBackError(GenserveError):
    """Applying failed; the previous version is served."""

    reason = "PUSH_ROLLED_BACK"


class ChecksumMismatchError(GenserveError):
    """A chunk's bytes are not those its CRC32C was computed from."""

    reason = "CHECKSUM_MISMATCH"


class StagingFullError(GenserveError):
    """There is no room to stage the push."""

    reason = "STAGING_FULL"


class QueueFullError(GenserveError):
    """Too many requests are waiting."""

    reason = "QUEUE_FULL"


class MessageTooLargeError(GenserveError):
    """A message is above the limit."""

    reason = "MESSAGE_TOO_LARGE"


class DrainingError(GenserveError):
    """The daemon is shutting down."""

    reason = "DRAINING"


class EngineDeadError(GenserveError):
    """The engine has died; the daemon is about to exit."""

    reason = "ENGINE_DEAD"


class UnsupportedError(GenserveError):
    """The daemon was started without what this call needs."""

    reason = "UNSUPPORTED"


class UnavailableError(GenserveError):
    """No daemon answers, or the connection to it broke."""

    reason = "UNAVAILABLE"


class DeadlineError(GenserveError):
    """Something did not happen within its time; nothing was changed."""

    reason = "DEADLINE_EXCEEDED"


class UnauthenticatedError(GenserveError):
    """No valid credentials."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(GenserveError):
    """The credentials do not allow this call."""

    reason = "PERMISSION_DENIED"


def all_errors() -> Iterator[type[GenserveError]]:
    """Every class of error that has a reason of its own."""
    yield from GenserveError.__subclasses__()


def error_for_reason(reason: str) -> type[GenserveError]:
    """The class that stands for `reason`, or the base class for one this version does not know."""
    return next((error for error in all_errors() if error.reason == reason), GenserveError)
