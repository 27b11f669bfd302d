"""Errors on the wire: one table from classes to codes, and the details that clients read instead of messages."""

import logging
import math
import secrets
from collections.abc import Iterator

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from genserve import errors
from genserve.errors import DOMAIN, GenserveError

log = logging.getLogger(__name__)

CODES: dict[type[GenserveError], grpc.StatusCode] = {
    GenserveError: grpc.StatusCode.INTERNAL,
    errors.InvalidFieldError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PromptTooLongError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ManifestMismatchError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ChunkOutOfRangeError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.LoraNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.PushNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.UpdateNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.ReplicaNotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.RequestIdInUseError: grpc.StatusCode.ALREADY_EXISTS,
    errors.PushConflictError: grpc.StatusCode.ALREADY_EXISTS,
    errors.WeightVersionMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.VersionNotNewerError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PauseLeaseLostError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.EngineSleepingError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.EngineTaintedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotResidentError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.FleetHeldError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LastReplicaError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnsupportedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PushTruncatedError: grpc.StatusCode.ABORTED,
    errors.ApplyInProgressError: grpc.StatusCode.ABORTED,
    errors.PushRolledBackError: grpc.StatusCode.ABORTED,
    errors.FleetPushError: grpc.StatusCode.ABORTED,
    errors.ChecksumMismatchError: grpc.StatusCode.DATA_LOSS,
    errors.StagingFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.MessageTooLargeError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.RateLimitedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DrainingError: grpc.StatusCode.UNAVAILABLE,
    errors.EngineDeadError: grpc.StatusCode.UNAVAILABLE,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.PeersFailedError: grpc.StatusCode.UNAVAILABLE,
    errors.NoReplicaError: grpc.StatusCode.UNAVAILABLE,
    errors.ReplicaLostError: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.UnauthenticatedError: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
}
"""The status code of each error."""

# A status travels in HTTP/2 trailers, of which gRPC takes 8 KiB in all: once as text, where a byte may take three, and
# once in base64 as the message below. The worst case: 3 * 600 + 4/3 * (600 + 800 + 2500 + framing) < 7.5 KiB.
_MAX_MESSAGE_BYTES = 600
_MAX_METADATA_BYTES = 800
_MAX_VALUE_BYTES = 200
_MAX_VIOLATIONS_BYTES = 2500
_MAX_VIOLATIONS = 20
_MAX_VIOLATION_BYTES = 300


def code_of(error: GenserveError) -> grpc.StatusCode:
    """The code of an error; a subclass of a listed class has the same code."""
    return next(CODES[cls] for cls in type(error).__mro__ if cls in CODES)


def to_status(error: GenserveError) -> grpc.Status:
    """The status for `abort_with_status`."""
    return rpc_status.to_status(to_message(error))


def to_message(error: GenserveError) -> status_pb2.Status:
    """The status as a message, with ErrorInfo and, where they help, BadRequest and RetryInfo. Long texts are cut; the
    reason never is."""
    code: int = code_of(error).value[0]
    status = status_pb2.Status(code=code, message=_cut(error.message, _MAX_MESSAGE_BYTES))
    status.details.extend(map(_packed, _details(error)))
    return status


def known_error(error: Exception, method: str) -> GenserveError:
    """The error, or one with a reason if it has none."""
    if isinstance(error, GenserveError):
        return error
    if isinstance(error, message.DecodeError):
        return errors.InvalidFieldError.of("frame", "is not a message of this method")
    return internal_error(error, method)


def internal_error(error: Exception, method: str) -> GenserveError:
    """The error for a client after an unexpected exception: an id under which the log has the details."""
    error_id = secrets.token_hex(4)
    log.error("internal error %s in %s", error_id, method, exc_info=error)
    return GenserveError(f"internal error {error_id}: see the daemon's log", metadata={"error_id": error_id})


def _details(error: GenserveError) -> Iterator[message.Message]:
    metadata = dict(_fitting_metadata(error))
    violations = list(_fitting_violations(error))
    if len(violations) < len(error.violations):
        metadata.setdefault("num_violations", str(len(error.violations)))  # the error may count more than it lists
    yield error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    if violations:
        yield error_details_pb2.BadRequest(field_violations=violations)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(math.ceil(1000 * error.retry_after_s))  # 0 would say at once
        yield error_details_pb2.RetryInfo(retry_delay=delay)


def _fitting_metadata(error: GenserveError) -> Iterator[tuple[str, str]]:
    num_bytes = 0
    for key, value in error.metadata.items():
        cut = _cut(value, _MAX_VALUE_BYTES)
        num_bytes += len(key.encode()) + len(cut.encode())
        if num_bytes > _MAX_METADATA_BYTES:
            return
        yield key, cut


def _fitting_violations(error: GenserveError) -> "Iterator[error_details_pb2.BadRequest.FieldViolation]":
    num_bytes = 0
    for violation in error.violations[:_MAX_VIOLATIONS]:
        field, description = (_cut(text, _MAX_VIOLATION_BYTES) for text in (violation.field, violation.description))
        num_bytes += len(field.encode()) + len(description.encode())
        if num_bytes > _MAX_VIOLATIONS_BYTES:
            return
        yield error_details_pb2.BadRequest.FieldViolation(field=field, description=description)


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed


def _cut(text: str, max_bytes: int) -> str:
    """At most `max_bytes` of UTF-8. Lone surrogates, which cannot be encoded, are replaced."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - len("…".encode())].decode(errors="ignore") + "…"
