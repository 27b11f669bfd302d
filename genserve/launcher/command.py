"""The command line of `genserve serve`."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields

from genserve.settings.config import ServeConfig

FlagValue = str | int | float | bool | os.PathLike[str] | Mapping[str, object] | Sequence[str | int | float] | None
"""What a flag can be given: None leaves it out, True is the bare flag, False its `--no-…` (nothing for a flag of the
daemon's own, which has none), a mapping is written as JSON, a sequence as several values."""


def serve_command(flags: Sequence[str]) -> list[str]:
    """`genserve serve` by this interpreter, on a free port unless the flags say which."""
    port = () if any(flag.partition("=")[0] == "--port" for flag in flags) else ("--port", "0")
    return [sys.executable, "-m", "genserve", "serve", *port, *flags]


def flags_of(values: Mapping[str, FlagValue]) -> list[str]:
    """Flags by their names with underscores: `max_model_len=2048` is `--max-model-len 2048`. Raises TypeError."""
    own_switches = {setting.name for setting in fields(ServeConfig) if isinstance(setting.default, bool)}
    flags = []
    for name, value in values.items():
        if value is None or (value is False and name in own_switches):
            continue
        flags += _flag(name.replace("_", "-"), value)
    return flags


def _flag(name: str, value: FlagValue) -> list[str]:
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(value)]
    if isinstance(value, str | int | float | os.PathLike):
        text = _text(name, value)
        # Of a value that begins like a flag only this form can be read; of --config vLLM reads only the other one.
        return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [f"--{name}", *(_text(name, each) for each in value)]
    raise _unfit(name, value)


def _text(name: str, value: object) -> str:
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise _unfit(name, value)


def _unfit(name: str, value: object) -> TypeError:
    return TypeError(f"{name.replace('-', '_')}: a value of type {type(value).__name__} cannot be given to a flag")
