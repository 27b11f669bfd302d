"""--config FILE.yaml of `serve`, `route` and `up`: flags in a file, under their own names."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

_MAX_BYTES = 1 << 20


def with_config_file(flags: Sequence[str], switches: Collection[str] = (), repeated: Collection[str] = ()) -> list[str]:
    """The flags, with those of the file that --config names in its place: before all others, which take precedence.

    `switches` are flags that have no --no- form, and `repeated` those that are given once for each value. Raises
    ValueError naming the file, and the key if one is wrong.
    """
    named = [index for index, flag in enumerate(flags) if flag.partition("=")[0] == "--config"]
    if not named:
        return list(flags)
    if len(named) > 1:
        raise ValueError("--config: pass one file")
    (index,) = named
    _, is_joined, path = flags[index].partition("=")
    if not is_joined:
        path = flags[index + 1] if index + 1 < len(flags) else ""
    if not path:
        raise ValueError("--config: names no file")
    others = [*flags[:index], *flags[index + (1 if is_joined else 2) :]]
    return [*_flags_of(path, switches, repeated), *others]


def _flags_of(path: str, switches: Collection[str], repeated: Collection[str]) -> Iterator[str]:
    shown, seen = _shown(path), set[str]()
    for key, value in _read(path).items():
        if not isinstance(key, str) or re.fullmatch("[A-Za-z][A-Za-z0-9_.-]*", key) is None or key == "config":
            raise ValueError(f"--config {shown}: {key!a} is not the name of a flag")
        flag = f"--{key.replace('_', '-')}"
        if flag in seen:
            raise ValueError(f"--config {shown}: {key} is there twice, with - and with _")
        seen.add(flag)
        match value:
            case True:
                yield flag
            case False:
                if flag not in switches:
                    yield f"--no-{flag[2:]}"
            case str() | int() | float():
                yield f"{flag}={value}"
            case dict():
                try:
                    yield f"{flag}={json.dumps(value)}"
                except (TypeError, ValueError, RecursionError) as error:  # a date, or what contains itself
                    raise ValueError(f"--config {shown}: {key}: {error}") from None
            case list() if value and all(_may_be_listed(each) for each in value):
                texts = [str(each) for each in value]
                yield from (f"{flag}={each}" for each in texts) if flag in repeated else (flag, *texts)
            case _:
                raise ValueError(f"--config {shown}: {key}: {value!a} is not the value of a flag")


def _read(path: str) -> dict[Any, Any]:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ValueError(f"--config: {error}: pip install pyyaml") from error
    try:
        with Path(path).open("rb") as file:
            read = file.read(_MAX_BYTES + 1)
        if len(read) > _MAX_BYTES:
            raise ValueError(f"has more than {_MAX_BYTES} bytes")
        loader = _own_loader(yaml)
        _refuse_repeated(yaml.compose(read, Loader=loader))
        content = yaml.load(read, Loader=loader)
    except OSError as error:
        raise ValueError(f"--config {_shown(path)}: {error.strerror}") from error
    # What looks like a date or a number and is none is a ValueError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"--config {_shown(path)}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"--config {_shown(path)}: must be a mapping of flags to values, is {type(content).__name__}")
    return content


def _own_loader(yaml: Any) -> Any:
    """PyYAML's safe loader, in which dates are dates. A package that vLLM imports for constraints (lm-format-enforcer)
    makes texts of them in the one that everybody shares."""
    loader: Any = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_timestamp)
    return loader


def _refuse_repeated(root: Any) -> None:
    """Raises ValueError for a key of the file that is there twice: YAML forbids it, and its parser takes the last."""
    lines: dict[str, int] = {}
    for key, _ in getattr(root, "value", ()) if getattr(root, "id", "") == "mapping" else ():
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines:
            raise ValueError(f"{name!a} is there twice, in lines {lines[name]} and {line}")
        lines[name] = line


def _may_be_listed(value: object) -> bool:
    """Not what would be the next flag on a command line."""
    return isinstance(value, str | int | float) and not (isinstance(value, str) and value.startswith("--"))


def _shown(path: str) -> str:
    """The path as it can be printed: the names of files need not be UTF-8."""
    return path.encode(errors="backslashreplace").decode()
