"""Every error has its code on the wire, and what goes with it arrives."""

import logging
import re
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from genserve import errors
from genserve.errors import FieldViolation, GenserveError
from genserve.rpc.status import CODES, internal_error, to_status

CONTRACT = {
    "INVALID_ARGUMENT": "INVALID_FIELD PROMPT_TOO_LONG MANIFEST_MISMATCH CHUNK_OUT_OF_RANGE",
    "NOT_FOUND": "LORA_NOT_FOUND PUSH_NOT_FOUND UPDATE_NOT_FOUND REPLICA_NOT_FOUND",
    "ALREADY_EXISTS": "REQUEST_ID_IN_USE PUSH_CONFLICT",
    "FAILED_PRECONDITION": "WEIGHT_VERSION_MISMATCH VERSION_NOT_NEWER PAUSE_LEASE_LOST ENGINE_SLEEPING ENGINE_TAINTED "
    "WEIGHTS_NOT_RESIDENT FLEET_HELD LAST_REPLICA UNSUPPORTED",
    "ABORTED": "PUSH_TRUNCATED APPLY_IN_PROGRESS PUSH_ROLLED_BACK FLEET_PUSH_FAILED",
    "DATA_LOSS": "CHECKSUM_MISMATCH",
    "RESOURCE_EXHAUSTED": "STAGING_FULL QUEUE_FULL MESSAGE_TOO_LARGE RATE_LIMITED",
    "UNAVAILABLE": "DRAINING ENGINE_DEAD UNAVAILABLE PEERS_FAILED NO_REPLICA REPLICA_LOST",
    "DEADLINE_EXCEEDED": "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED": "UNAUTHENTICATED",
    "PERMISSION_DENIED": "PERMISSION_DENIED",
    "INTERNAL": "INTERNAL",
}
"""Code -> reasons, as the wire contract has them."""


def subclasses(cls: type[GenserveError]) -> Iterator[type[GenserveError]]:
    """The class and all that derive from it in the daemon."""
    yield cls
    for derived in cls.__subclasses__():
        if derived.__module__ == errors.__name__:
            yield from subclasses(derived)


def decoded(status: grpc.Status) -> status_pb2.Status:
    """The message in the trailers, after checking that it says what the status says."""
    ((key, value),) = status.trailing_metadata
    assert key == "grpc-status-details-bin"
    message = status_pb2.Status.FromString(value)
    assert (message.code, message.message) == (status.code.value[0], status.details)
    return message


def detail(status: status_pb2.Status, kind: type) -> object:
    """The one detail of a kind."""
    (found,) = [each for each in status.details if each.Is(kind.DESCRIPTOR)]
    message = kind()
    assert found.Unpack(message)
    return message


def test_every_error_is_in_the_table() -> None:
    """A new class without a line in the table fails here, not in production."""
    assert set(CODES) == set(subclasses(GenserveError))


def test_codes_are_those_of_the_contract() -> None:
    """Other people's clients rely on them."""
    by_code = {code.name: {cls.reason for cls, its in CODES.items() if its is code} for code in set(CODES.values())}
    assert by_code == {code: set(reasons.split()) for code, reasons in CONTRACT.items()}


def test_details_carry_reason_fields_and_delay() -> None:
    """A client needs no message to know what to do."""
    error = errors.QueueFullError(
        "full", violations=[FieldViolation("a.b", "is wrong")], retry_after_s=1.5, metadata={"depth": "9"}
    )
    status = decoded(to_status(error))
    info = detail(status, error_details_pb2.ErrorInfo)
    assert (info.reason, info.domain, dict(info.metadata)) == ("QUEUE_FULL", "genserve", {"depth": "9"})
    (violation,) = detail(status, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("a.b", "is wrong")
    assert detail(status, error_details_pb2.RetryInfo).retry_delay.ToTimedelta().total_seconds() == 1.5


def test_details_that_do_not_help_are_left_out() -> None:
    """No empty BadRequest, and no delay of zero that would mean "now"."""
    status = decoded(to_status(errors.DrainingError("bye")))
    assert [each.type_url.rsplit(".", 1)[1] for each in status.details] == ["ErrorInfo"]


def test_a_subclass_has_the_code_of_its_base() -> None:
    """So that code beside the daemon can refine an error."""

    class PickyError(errors.StagingFullError):
        pass

    assert to_status(PickyError("no")).code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("letter", ["x", "é", "漢", "🙂", "\ud800"])
def test_no_error_is_too_large_for_trailers(letter: str) -> None:
    """gRPC ends a call whose trailers exceed 8 KiB with RESOURCE_EXHAUSTED, and the reason would be lost."""
    error = errors.ManifestMismatchError(
        letter * 10_000,
        violations=[FieldViolation(letter * 1000, letter * 1000)] * 1000,
        metadata={f"key{i}": letter * 1000 for i in range(100)},
    )
    status = to_status(error)
    percent_encoded = 3 * len(status.details.encode())
    base64 = 4 / 3 * len(status.trailing_metadata[0][1])
    assert percent_encoded + base64 < 7.5 * 1024
    message = decoded(status)
    info = detail(message, error_details_pb2.ErrorInfo)
    assert info.reason == "MANIFEST_MISMATCH"
    assert info.metadata["num_violations"] == "1000"
    assert len(detail(message, error_details_pb2.BadRequest).field_violations) >= 3


def test_twenty_short_violations_are_all_told() -> None:
    """What is bounded is the size: an honest list of tensors arrives."""
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(20)]
    error = errors.ManifestMismatchError("no", violations=[FieldViolation(name, "is missing") for name in names])
    violations = detail(decoded(to_status(error)), error_details_pb2.BadRequest).field_violations
    assert [violation.field for violation in violations] == names


def test_an_unforeseen_error_is_told_by_an_id_that_the_log_has(caplog: pytest.LogCaptureFixture) -> None:
    """Clients see nothing of the inside; operators find the traceback."""
    try:
        raise KeyError("secret")
    except KeyError as error:
        with caplog.at_level(logging.ERROR):
            told = internal_error(error, "/genserve.v1.X/Y")
    status = to_status(told)
    assert status.code is grpc.StatusCode.INTERNAL
    error_id = told.metadata["error_id"]
    assert re.fullmatch("[0-9a-f]{8}", error_id)  # short enough to be read out
    assert error_id in status.details
    assert not re.search("secret|KeyError", status.details)
    (record,) = caplog.records
    assert error_id in record.getMessage() and "/genserve.v1.X/Y" in record.getMessage()
    assert record.exc_info is not None and record.exc_info[0] is KeyError


def test_the_first_of_too_many_violations_are_reported() -> None:
    """And how many there were."""
    error = errors.ManifestMismatchError("no", violations=[FieldViolation(str(i), "is missing") for i in range(21)])
    status = decoded(to_status(error))
    violations = detail(status, error_details_pb2.BadRequest).field_violations
    assert [violation.field for violation in violations] == [str(i) for i in range(20)]
    assert detail(status, error_details_pb2.ErrorInfo).metadata["num_violations"] == "21"


def test_the_number_of_violations_is_that_of_the_error_if_it_says_one() -> None:
    """It does not list all that it counts."""
    violations = [FieldViolation(str(i), "is missing") for i in range(21)]
    error = errors.ManifestMismatchError("no", violations=violations, metadata={"num_violations": "600"})
    assert detail(decoded(to_status(error)), error_details_pb2.ErrorInfo).metadata["num_violations"] == "600"


@pytest.mark.parametrize("more", [0, 1])
def test_a_long_text_is_cut_and_its_neighbours_are_not(more: int) -> None:
    """A name that somebody made up does not keep the path of a file from the reader."""
    error = errors.ManifestMismatchError(
        "no",
        violations=[FieldViolation("f" * (300 + more), "d"), FieldViolation("f", "d" * (300 + more))],
        metadata={"long": "v" * (200 + more), "short": "v"},
    )
    status = decoded(to_status(error))
    violations = detail(status, error_details_pb2.BadRequest).field_violations
    assert [each.field for each in violations] == ["f" * 300 if not more else "f" * 297 + "…", "f"]
    assert [each.description for each in violations] == ["d", "d" * 300 if not more else "d" * 297 + "…"]
    metadata = dict(detail(status, error_details_pb2.ErrorInfo).metadata)
    assert metadata == {"long": "v" * 200 if not more else "v" * 197 + "…", "short": "v"}


@pytest.mark.parametrize("more", [0, 1])
def test_what_just_fits_is_told_whole(more: int) -> None:
    """And one byte more is not: the message ends with an ellipsis, and the last of the others are left out."""
    error = errors.ManifestMismatchError(
        "x" * (600 + more),
        violations=[FieldViolation("f" * 200, "d" * 50)] * 9 + [FieldViolation("f" * 200, "d" * (50 + more))],
        metadata={"k" * 100: "v" * 200, "l" * 100: "v" * 200, "m" * (100 + more): "v" * 100},
    )
    status = decoded(to_status(error))
    assert status.message == ("x" * 600 if not more else "x" * 597 + "…")
    metadata = dict(detail(status, error_details_pb2.ErrorInfo).metadata)
    assert metadata.pop("num_violations", None) == (None if not more else "10")
    assert len(metadata) == 3 - more
    assert len(detail(status, error_details_pb2.BadRequest).field_violations) == 10 - more
