"""Flags that are made of the fields of a dataclass: the field gives the name, the type, the default and the help."""

import argparse
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields
from typing import Any, Final, TypeVar

T = TypeVar("T")

_SECONDS: Final = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def setting(default: Any, help: str, choices: Sequence[str] | None = None) -> Any:
    """A field that is a flag."""
    return field(default=default, metadata={"help": help, "choices": choices})


def settings_of(cls: type[Any]) -> Iterator["Field[Any]"]:
    """The fields of a dataclass that are flags."""
    return (each for each in fields(cls) if "help" in each.metadata)


def flag_of(name: str) -> str:
    """The flag of a field. A time has its unit in the value of its flag, and in the name of its field."""
    return f"--{name.removesuffix('_s').replace('_', '-')}"


def seconds(text: str) -> float:
    """Parses a time such as 60s, 500ms, 2m, 1h or 60 (seconds)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(ms|s|m|h|)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 60s, 500ms or 2m")
    return float(match[1]) * _SECONDS[match[2]]


def switches_of(cls: type[Any]) -> list[str]:
    """The flags without a value, which are off unless they are given."""
    return [flag_of(each.name) for each in settings_of(cls) if isinstance(each.default, bool)]


def add_flags(
    group: "argparse._ArgumentGroup", cls: type[Any], *, of: type[Any] | None = None, tells_default: bool = False
) -> None:
    """Adds a flag for each setting of `cls`, or for those that `of`, a base class, has, too. `tells_default` adds the
    default to the help, which vLLM's parser does itself."""
    names = {each.name for each in settings_of(cls if of is None else of)}
    for each in settings_of(cls):
        if each.name not in names:
            continue
        help, default = each.metadata["help"], each.default
        if isinstance(default, bool):
            group.add_argument(flag_of(each.name), action="store_true", default=default, help=help)
        else:
            if tells_default and default != "":
                help = f"{help} (default: %(default)s)"
            is_time = each.name.endswith("_s")
            group.add_argument(
                flag_of(each.name),
                dest=each.name,
                type=seconds if is_time else type(default),
                default=f"{default:g}s" if is_time else default,  # argparse parses what is a text
                choices=each.metadata["choices"],
                metavar=None
                if each.metadata["choices"]
                else "TIME"
                if is_time
                else each.name.rpartition("_")[2].upper(),
                help=help,
            )


def values_of(cls: type[Any], parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `cls` among parsed flags."""
    return {each.name: parsed[each.name] for each in settings_of(cls)}


def as_flags(settings: Any, of: type[Any], *, without: Collection[str] = ()) -> list[str]:
    """The flags of the settings of `of` that are not as by default, for another command of genserve."""
    return [
        flag_of(each.name) if value is True else f"{flag_of(each.name)}={value}"
        for each in settings_of(of)
        if each.name not in without and (value := getattr(settings, each.name)) != each.default
    ]
