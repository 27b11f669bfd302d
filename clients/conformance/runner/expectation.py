"""Compares what a driver printed with what a scenario expects. Pure."""

from collections.abc import Callable, Iterator
from typing import Any

Rule = Callable[[Any], Any]
"""The value that a rule stands for, from its argument."""


def step_differences(found: Any, expected: dict[str, Any], rules: dict[str, Rule]) -> Iterator[str]:
    """What differs in the result of a step. Other fields may be more than is expected; an error is never, and beside
    it nothing else is there."""
    if isinstance(found, dict) and "error" in found and "error" not in expected:
        error = found["error"]
        if error == {"reason": "NOT_IMPLEMENTED"}:
            yield "the driver does not have this step"
        else:
            yield f"failed with {error!r}, expected {', '.join(expected) or 'no error'}"
    else:
        yield from differences(found, expected, rules)


def differences(found: Any, expected: Any, rules: dict[str, Rule], path: str = "") -> Iterator[str]:
    """What differs, each as one line. `rules`: those whose values only the runner knows, by name."""
    if isinstance(expected, dict) and any(key.startswith("$") for key in expected):
        yield from _by_rule(found, expected, rules, path)
    elif isinstance(expected, dict) and isinstance(found, dict):
        for key, value in expected.items():
            if key in found:
                yield from differences(found[key], value, rules, f"{path}.{key}".lstrip("."))
            elif value != {"$absent": True}:
                yield f"{path}.{key}".lstrip(".") + f": is absent; there are {', '.join(found) or 'no fields'}"
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        inside = [list(differences(found[i], value, rules, f"{path}[{i}]")) for i, value in enumerate(expected)]
        wrong = [each for each in inside if each]
        if len(wrong) > 1 and not any(isinstance(value, dict | list) for value in expected):
            yield f"{wrong[0][0]}, and {len(wrong) - 1} more of {len(expected)}"
        else:
            yield from (line for each in wrong for line in each)
    elif type(found) is not type(expected) or found != expected:
        yield f"{path or 'result'}: {found!r}, expected {expected!r}"


def _by_rule(found: Any, expected: dict[str, Any], rules: dict[str, Rule], path: str) -> Iterator[str]:
    for name, argument in expected.items():
        if name in rules:
            yield from differences(found, rules[name](argument), rules, path)
        elif name == "$each" and isinstance(found, list) and found:
            for i, item in enumerate(found):
                yield from differences(item, argument, rules, f"{path}[{i}]")
        elif name == "$absent":
            yield f"{path or 'result'}: {found!r}, expected none"
        elif not _holds(name, found, argument):
            yield f"{path or 'result'}: {found!r} is not {name[1:]} {argument!r}"


def _holds(name: str, found: Any, argument: Any) -> bool:
    number = isinstance(found, int | float) and not isinstance(found, bool)
    match name:
        case "$between":
            return number and argument[0] <= found <= argument[1]
        case "$length":
            return isinstance(found, list) and len(found) == argument
        case "$distinct":
            return isinstance(found, list) and all(each not in found[:i] for i, each in enumerate(found)) == argument
        case "$one_of":
            return found in argument
        case "$without":
            return isinstance(found, str) and not any(each in found for each in argument)
        case "$each":
            return False  # it is no list, or has no item
    raise ValueError(f"{name} is no rule")
