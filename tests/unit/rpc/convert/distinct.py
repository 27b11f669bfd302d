"""Objects whose fields all differ, and what they say under the client's names."""

import dataclasses
import enum
import itertools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

T = TypeVar("T")


def distinct(kind: type[T], **given: Any) -> T:
    """A dataclass of which no two fields have one value, as far as their types allow; True for every flag. `given` are
    fields that are set to something of their own."""
    return _filled(kind, itertools.count(11), given)


def _filled(kind: type[T], numbers: Iterator[int], given: Mapping[str, Any]) -> T:
    hints = typing.get_type_hints(kind)
    fields = (field for field in dataclasses.fields(kind) if field.init)  # type: ignore[arg-type]
    return kind(**{f.name: given[f.name] if f.name in given else _value(hints[f.name], numbers) for f in fields})


def _value(hint: Any, numbers: Iterator[int]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _value(next(each for each in arguments if each is not type(None)), numbers)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return tuple(_value(each, numbers) for each in arguments)
    if origin in (tuple, list, Sequence):
        values = [_value(arguments[0], numbers) for _ in range(2)]
        return tuple(values) if origin is tuple else values
    if origin in (dict, Mapping):
        return {_value(arguments[0], numbers): _value(arguments[1], numbers) for _ in range(2)}
    if dataclasses.is_dataclass(hint):
        return _filled(hint, numbers, {})  # type: ignore[arg-type]
    if issubclass(hint, tuple):
        return hint(*(_value(each, numbers) for each in typing.get_type_hints(hint).values()))
    if issubclass(hint, enum.Enum):
        members = list(hint)
        return members[next(numbers) % len(members)]
    number = next(numbers)
    plain = {bool: True, int: number, float: number + 0.25, str: f"text-{number}", object: f"object-{number}"}
    return plain[hint]


def said(value: Any) -> Any:
    """Plain values: those of a daemon's object and those of the client's are equal if both say the same."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: said(getattr(value, field.name)) for field in dataclasses.fields(value) if field.compare}
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, Mapping):
        return {key: said(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [said(each) for each in value]
    return value
