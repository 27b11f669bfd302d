"""One class of exception for each reason of the wire contract.

The daemon raises these classes, `rpc.status` turns them into status codes with the reason in `google.rpc.ErrorInfo`
(domain `genserve`), and the client raises the same classes again. This module imports nothing of genserve.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

DOMAIN = "genserve"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """What is wrong with one field of a request. `field` is its path in the message, as in `google.rpc.BadRequest`."""

    field: str
    description: str


class GenserveError(Exception):
    """A fault in the daemon. Its log has the cause under the `error_id` of the error's metadata.

    Base class of all errors that have a reason. `violations` name the wrong fields or tensors. `retry_after_s` is the
    time to wait before a retry, in seconds, or None. `metadata` holds values for programs.
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
        """A copy of this error to raise again. Storing the raised error itself would keep its stack frames alive, and
        they may hold a large message."""
        return type(self)(
            self.message, violations=self.violations, retry_after_s=self.retry_after_s, metadata=self.metadata
        )


class InvalidFieldError(GenserveError):
    """A field of the request has a value that the daemon does not accept."""

    reason = "INVALID_FIELD"

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidFieldError":
        """Returns the error for one field, which is named by its path in the message."""
        return cls(f"{field}: {description}", violations=[FieldViolation(field, description)])


class PromptTooLongError(GenserveError):
    """The prompt leaves no room for output in the context of the model."""

    reason = "PROMPT_TOO_LONG"


class ManifestMismatchError(GenserveError):
    """The manifest does not match the served checkpoint. The violations name the tensors."""

    reason = "MANIFEST_MISMATCH"


class ChunkOutOfRangeError(GenserveError):
    """A chunk lies outside the byte space of the manifest."""

    reason = "CHUNK_OUT_OF_RANGE"


class LoraNotFoundError(GenserveError):
    """No adapter with this name is loaded."""

    reason = "LORA_NOT_FOUND"


class PushNotFoundError(GenserveError):
    """No push with this id exists. It may have expired."""

    reason = "PUSH_NOT_FOUND"


class UpdateNotFoundError(GenserveError):
    """No weight update with this id is open. An update that expires is undone."""

    reason = "UPDATE_NOT_FOUND"


class RequestIdInUseError(GenserveError):
    """A request with this id is already running."""

    reason = "REQUEST_ID_IN_USE"

    @classmethod
    def of(cls, request_id: str) -> "RequestIdInUseError":
        """Returns the error for an id."""
        return cls(f"a request {request_id!r} is already running")


class PushConflictError(GenserveError):
    """The push id belongs to a push with another version, manifest or bytes."""

    reason = "PUSH_CONFLICT"


class WeightVersionMismatchError(GenserveError):
    """The served version, or that of the adapter, is not the one that the request asks for."""

    reason = "WEIGHT_VERSION_MISMATCH"


class VersionNotNewerError(GenserveError):
    """The pushed version is not above the served version, or that of an adapter not above the loaded one."""

    reason = "VERSION_NOT_NEWER"


class PauseLeaseLostError(GenserveError):
    """The pause lease is unknown or has expired."""

    reason = "PAUSE_LEASE_LOST"


class EngineSleepingError(GenserveError):
    """The engine sleeps: it has released its memory."""

    reason = "ENGINE_SLEEPING"


class NotResidentError(GenserveError):
    """The daemon does not keep the bytes of the served version. Partial pushes and pulls need them."""

    reason = "WEIGHTS_NOT_RESIDENT"


class EngineTaintedError(GenserveError):
    """The live weights may be inconsistent. Push a complete version or restart the daemon."""

    reason = "ENGINE_TAINTED"


class PushTruncatedError(GenserveError):
    """The push ended before all bytes arrived. The daemon keeps those that arrived until `staging_ttl` ends."""

    reason = "PUSH_TRUNCATED"


class ApplyInProgressError(GenserveError):
    """Another push or weight update is in progress. The metadata names it."""

    reason = "APPLY_IN_PROGRESS"


class PushRolledBackError(GenserveError):
    """The push could not be applied. The previous version is served."""

    reason = "PUSH_ROLLED_BACK"


class ChecksumMismatchError(GenserveError):
    """The bytes of a chunk do not match its CRC32C, or the contents of a push its `content_digest`."""

    reason = "CHECKSUM_MISMATCH"


class StagingFullError(GenserveError):
    """There is not enough memory to stage the push, or 256 pushes of weights or of adapters are here, or workers hold
    another prepared push. The metadata names the pushes in the way."""

    reason = "STAGING_FULL"


class QueueFullError(GenserveError):
    """Too many requests wait, or too many watch streams are open."""

    reason = "QUEUE_FULL"


class MessageTooLargeError(GenserveError):
    """A message is larger than the limit."""

    reason = "MESSAGE_TOO_LARGE"


class RateLimitedError(GenserveError):
    """The callers of this role make more calls per second than the server allows them."""

    reason = "RATE_LIMITED"


class DrainingError(GenserveError):
    """The daemon is starting or shutting down."""

    reason = "DRAINING"


class EngineDeadError(GenserveError):
    """The engine has died. The daemon is about to exit."""

    reason = "ENGINE_DEAD"


class UnsupportedError(GenserveError):
    """The daemon was started without a feature that this call needs, or has no such call."""

    reason = "UNSUPPORTED"


class UnavailableError(GenserveError):
    """No daemon answers, or the connection broke. Only the client raises this."""

    reason = "UNAVAILABLE"


class PeersFailedError(GenserveError):
    """No peer sent the requested version. The message gives the reason for each address."""

    reason = "PEERS_FAILED"


class NoReplicaError(GenserveError):
    """No replica of the fleet may serve the request. The message says why."""

    reason = "NO_REPLICA"


class FleetHeldError(GenserveError):
    """Another router, which the metadata names as `router_address`, manages the replica; or none does."""

    reason = "FLEET_HELD"


class LastReplicaError(GenserveError):
    """No other replica has a version or adapter that was pushed to the fleet. It would be lost."""

    reason = "LAST_REPLICA"


class ReplicaNotFoundError(GenserveError):
    """No replica with this address belongs to the fleet."""

    reason = "REPLICA_NOT_FOUND"


class ReplicaLostError(GenserveError):
    """The replica that ran the request is lost, after a part of the answer was delivered; or three were, in turn."""

    reason = "REPLICA_LOST"


class FleetPushError(GenserveError):
    """A replica of a fleet could not take the push, so nothing was changed on any of them."""

    reason = "FLEET_PUSH_FAILED"


class DeadlineError(GenserveError):
    """The call did not finish within its timeout. After a push, `GetPush` reports its outcome."""

    reason = "DEADLINE_EXCEEDED"


class UnauthenticatedError(GenserveError):
    """The call has no valid credentials."""

    reason = "UNAUTHENTICATED"


class PermissionDeniedError(GenserveError):
    """The credentials do not allow this call."""

    reason = "PERMISSION_DENIED"


def all_errors() -> Iterator[type[GenserveError]]:
    """Yields every error class that has a reason of its own."""
    yield from GenserveError.__subclasses__()


def error_for_reason(reason: str) -> type[GenserveError]:
    """Returns the class for `reason`, or the base class if this version of genserve does not know the reason."""
    return next((error for error in all_errors() if error.reason == reason), GenserveError)


REASONS: Final = (GenserveError.reason, *(error.reason for error in all_errors()))
"""Every reason that this version of genserve gives."""
