"""Enum values to words and back: `"keep"` here is `PAUSE_MODE_KEEP` on the wire."""

import reprlib
from typing import TYPE_CHECKING, TypeVar

from genserve.errors import InvalidFieldError

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

ValueT = TypeVar("ValueT", bound=int)


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
