"""Converts Python values to protobuf fields, and words to enum values: `"keep"` here is `PAUSE_MODE_KEEP` on the wire.
An invalid value raises an InvalidFieldError that names the field and option."""

import difflib
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from math import isnan
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from genserve.errors import InvalidFieldError
from genserve.wire.conversions import duration_of

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

ValueT = TypeVar("ValueT", bound=int)
MessageT = TypeVar("MessageT", bound=Message)

# The errors that protobuf, json and genserve raise for a value of the wrong type, size or depth.
_REFUSALS: Final = (TypeError, ValueError, OverflowError, AttributeError, RecursionError)
_MAX_SECONDS: Final = 315_576_000_000.0  # of a Duration: 10,000 years
_NO_NAMES: Final[Mapping[str, str]] = {}


def wire_value(enum: "_EnumTypeWrapper[ValueT]", word: str | None, field: str) -> ValueT:
    """The enum's value for `word`, UNSPECIFIED for None. Raises InvalidFieldError naming `field` for an unknown
    word."""
    values = enum.DESCRIPTOR.values
    prefix = values[0].name.removesuffix("UNSPECIFIED")
    name = prefix + ("UNSPECIFIED" if word is None else word.upper() if isinstance(word, str) else "")
    if not name.isascii() or name not in enum.DESCRIPTOR.values_by_name:
        words = ", ".join(value.name.removeprefix(prefix).lower() for value in values[1:])
        raise InvalidFieldError.of(field, f"{reprlib.repr(word)} is not one of {words}")
    return enum.Value(name)


def word_of(enum: "_EnumTypeWrapper[ValueT]", value: ValueT) -> str:
    """The word for `value`; `unknown_9` for a value of a newer daemon."""
    known = enum.DESCRIPTOR.values_by_number.get(value)
    if known is None:
        return f"unknown_{value}"
    return known.name.removeprefix(enum.DESCRIPTOR.values[0].name.removesuffix("UNSPECIFIED")).lower()


def build(
    kind: type[MessageT], fields: Mapping[str, Any], *, path: str = "", options: Mapping[str, str] = _NO_NAMES
) -> MessageT:
    """Builds a message from these fields; fields that are None are not set.

    `path` is the place of the message, for errors. `options` has the Python names of fields that differ. Raises
    InvalidFieldError for an invalid value, and for text instead of a sequence, which protobuf would split into letters.
    """
    for name, value in fields.items():
        if isinstance(value, str | bytes | Mapping) and _is_sequence(kind, name):
            raise _invalid(path, name, value, "must be a sequence", options)
    try:
        return kind(**fields)
    except _REFUSALS:
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except _REFUSALS as error:
                raise _invalid(path, name, value, _cause(error), options) from error
        raise


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Turns an error about a wrong value into an InvalidFieldError for the field at `path`."""
    try:
        yield
    except _REFUSALS as error:
        raise InvalidFieldError.of(path, _cause(error)) from error


def refuse_unknown(options: Mapping[str, object], kind: type) -> None:
    """Raises TypeError for a keyword argument that `kind`, a TypedDict, does not have. It names a similar one."""
    known = kind.__annotations__
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise TypeError(f"unknown option {', '.join(unknown)}{meant_by(unknown, known)}")


def meant_by(unknown: Iterable[str], known: Collection[str]) -> str:
    """How an error about unknown names ends: with those that each begins, or else with a similar one. "" = none."""
    similar: list[str] = []
    for name in unknown:
        similar += [each for each in known if each.startswith(name)] or difflib.get_close_matches(name, known, n=1)
    return f"; is {' or '.join(dict.fromkeys(similar))} meant?" if similar else ""


def check_count(value: object, option: str) -> None:
    """Raises InvalidFieldError, naming `option`, unless the value is a whole number above 0 that an int32 holds."""
    if not isinstance(value, Integral) or not 0 < int(value) < 1 << 31:
        raise InvalidFieldError.of(option, f"{reprlib.repr(value)} is not a whole number above 0")


def check_switch(value: object, option: str) -> None:
    """Raises InvalidFieldError, naming `option`, unless the value is True or False."""
    if not isinstance(value, bool):
        raise InvalidFieldError.of(option, f"{reprlib.repr(value)} is neither True nor False")


def duration(seconds: float, option: str) -> Duration:
    """Seconds as protobuf's Duration. Raises InvalidFieldError, naming `option`, for an invalid time."""
    if not is_seconds(seconds) or abs(seconds) > _MAX_SECONDS:
        raise InvalidFieldError.of(option, f"{reprlib.repr(seconds)} is not a number of seconds")
    return duration_of(seconds)


def is_seconds(value: object) -> bool:
    """Whether the value is a number; infinity is one."""
    return isinstance(value, Real) and not isnan(value)


def optional_duration(seconds: float | None, option: str) -> Duration | None:
    """The same; None stays None."""
    return None if seconds is None else duration(seconds, option)


def utc_time(message: Message, field: str) -> datetime | None:
    """A Timestamp of a message in UTC; None if it is not set."""
    if not message.HasField(field):
        return None
    return as_utc(getattr(message, field))


def as_utc(timestamp: Timestamp) -> datetime:
    """A Timestamp in UTC; the nearest time that a datetime can be if it is none, which is up to whoever answers."""
    try:
        time: datetime = timestamp.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        return (datetime.min if timestamp.seconds < 0 else datetime.max).replace(tzinfo=UTC)
    return time


def _is_sequence(kind: type[Message], name: str) -> bool:
    field: Any = kind.DESCRIPTOR.fields_by_name.get(name)
    if field is None:
        return False
    # Old versions of protobuf do not have `is_repeated`, and new ones warn about `label`.
    if not (field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED):
        return False
    return field.message_type is None or not field.message_type.GetOptions().map_entry


def _invalid(path: str, name: str, value: Any, problem: str, options: Mapping[str, str]) -> InvalidFieldError:
    option = options.get(name, name)
    given = reprlib.repr(value) if option == name else f"{option}={reprlib.repr(value)}"
    return InvalidFieldError.of(f"{path}.{name}" if path else name, f"{given}: {problem}")


def _cause(error: Exception) -> str:
    return str(error) or type(error).__name__
