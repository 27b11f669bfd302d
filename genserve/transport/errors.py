"""Converts status codes back into the exceptions of `genserve.errors`, by the daemon's reason, never by its message."""

import re
from contextlib import suppress
from typing import Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from genserve.errors import (
    DOMAIN,
    DeadlineError,
    FieldViolation,
    GenserveError,
    MessageTooLargeError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
    error_for_reason,
)
from genserve.security.caller import Caller
from genserve.transport.unconnected import why_unconnected
from genserve.wire.conversions import seconds_of


class ClientClosedError(RuntimeError):
    """The client was closed before or during the call. Only the client raises it, without a reason on the wire. A
    program that retries the refusals of a daemon must not retry this."""


class ClientMisuseError(RuntimeError):
    """The client cannot work where it is called: in a process forked after its first use, on another event loop than
    that of its first call, or on the event loop of a blocking client."""


SETTINGS: Final = "settings"
"""Key of an error's metadata."""
_STATUS_DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}


# For codes of gRPC itself, which have no genserve reason.
_ERROR_BY_CODE: dict[grpc.StatusCode, type[GenserveError]] = {
    grpc.StatusCode.CANCELLED: UnavailableError,  # by the other side: what is cancelled here raises CancelledError
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: MessageTooLargeError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
}
_BROKEN = re.compile(
    r"(?:Stream removed \()?(?:\w+: ?)*(Socket closed|Connection reset by peer|Broken pipe)(?: \(\d+\))?\)?"
    r"|Stream removed \((.*)\)",
    re.IGNORECASE,
)
"""What gRPC says of a call whose connection ends: its server may be gone, or be one of several processes. Before what
the operating system says may stand its call, such as recvmsg."""
_LATE = re.compile(r"(?:Stream removed \()?(?:Deadline Exceeded|DEADLINE_EXCEEDED)\)?", re.IGNORECASE)
"""What gRPC says of a call that the client itself has ended at its deadline."""


def error_of(error: grpc.aio.AioRpcError, target: str, caller: Caller | None = None) -> GenserveError:
    """The typed exception for a failed call to `target`, which `caller` has made.

    A code or reason that this version does not know becomes a plain `GenserveError`; its metadata then has `code` and,
    if one was given, `reason`. Where TLS is why there is no connection, it has `settings`: the names of those that
    may be wrong.
    """
    return _typed(error.code(), error.details(), _status_of(error), target, caller)


def error_of_status(status: status_pb2.Status, target: str) -> GenserveError:
    """The same for a status that came in a message."""
    return _typed(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message, status, target)


def _typed(
    code: grpc.StatusCode,
    description: str | None,
    status: status_pb2.Status,
    target: str,
    caller: Caller | None = None,
) -> GenserveError:
    info: error_details_pb2.ErrorInfo | None = None
    violations: list[FieldViolation] = []
    retry_after_s: float | None = None
    for detail in status.details:
        try:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                candidate = error_details_pb2.ErrorInfo.FromString(detail.value)
                info = candidate if candidate.domain == DOMAIN else info
            elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                request = error_details_pb2.BadRequest.FromString(detail.value)
                violations += [FieldViolation(each.field, each.description) for each in request.field_violations]
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry_after_s = seconds_of(error_details_pb2.RetryInfo.FromString(detail.value).retry_delay)
        except DecodeError:  # of a proxy, or cut: the code and the message still say what failed
            continue

    details = description or code.name
    metadata = dict(info.metadata) if info is not None else {}
    if info is not None:
        error_class = error_for_reason(info.reason)
        message = details
    else:
        error_class = _ERROR_BY_CODE.get(code, GenserveError)
        message = details
        if code is grpc.StatusCode.CANCELLED:
            message = f"{target} has ended the call, or its connection broke: {details}"
        elif error_class is UnavailableError and (broken := _BROKEN.fullmatch(details)) is not None:
            message = f"the connection to {target} broke: {broken[1] or broken[2]}"
        elif error_class is UnavailableError:
            why, settings = why_unconnected(details, caller)
            message = f"no daemon answers at {target}: {why}"
            if settings:
                metadata[SETTINGS] = " ".join(settings)
        elif error_class is DeadlineError and _LATE.fullmatch(details) is not None:
            message = f"the call to {target} did not finish within its timeout"
        elif error_class is UnsupportedError:
            message = f"what answers at {target} does not have this call: {details}"
    if error_class is GenserveError:
        metadata["code"] = code.name
        if info is not None:
            metadata["reason"] = info.reason
    return error_class(message, violations=violations, retry_after_s=retry_after_s, metadata=metadata)


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            with suppress(DecodeError):  # a proxy's: the code and the message still say what failed
                return status_pb2.Status.FromString(value)
    return status_pb2.Status()
