"""What the runner of the conformance scenarios takes for a difference."""

from typing import Any

import pytest

from clients.conformance.runner.expectation import differences, step_differences
from clients.conformance.runner.scenario import filled


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a: 1, expected 2"]),
        ({"a": 1}, {"a": True}, ["a: 1, expected True"]),
        ({"a": 1.0}, {"a": 1}, ["a: 1.0, expected 1"]),
        ({"b": 1}, {"a": 1}, ["a: is absent; there are b"]),
        ({"a": 1}, {"a": {"$absent": True}}, ["a: 1, expected none"]),
        ({}, {"a": {"$absent": True}}, []),
        ([1, 2], [1], ["result: [1, 2], expected [1]"]),
        ({"a": [{"b": [1, 2]}]}, {"a": [{"b": [1, 3]}]}, ["a[0].b[1]: 2, expected 3"]),
        ({"a": [1, 2, 3]}, {"a": [1, 5, 6]}, ["a[1]: 2, expected 5, and 1 more of 3"]),
        ([1, 9], {"$each": {"$between": [0, 5]}, "$length": 2}, ["[1]: 9 is not between [0, 5]"]),
        ([1], {"$each": {"$between": [0, 5]}, "$length": 2}, ["result: [1] is not length 2"]),
        ("x", {"$each": {"$between": [0, 5]}}, ["result: 'x' is not each {'$between': [0, 5]}"]),
        ([], {"$each": 1}, ["result: [] is not each 1"]),
        ([1, 2, 1], {"$distinct": True}, ["result: [1, 2, 1] is not distinct True"]),
        ([{"a": 1}, {"a": 2}], {"$distinct": True}, []),
        (True, {"$between": [0, 5]}, ["result: True is not between [0, 5]"]),
        ("hello", {"$without": ["l"]}, ["result: 'hello' is not without ['l']"]),
        ("x", {"$one_of": ["a", "b"]}, ["result: 'x' is not one_of ['a', 'b']"]),
        ([3], {"$twice": 1}, ["[0]: 3, expected 2"]),
    ],
)  # fmt: skip
def test_what_differs_is_named_by_its_path(found: Any, expected: Any, said: list[str]) -> None:
    assert list(differences(found, expected, {"$twice": lambda number: [2 * number]})) == said


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, []),
        ({"error": {"reason": "X"}}, {"error": {"reason": "X"}}, []),
        ({"error": {"reason": "X"}}, {"a": 1, "b": 1}, ["failed with {'reason': 'X'}, expected a, b"]),
        ({"error": {"reason": "X"}}, {}, ["failed with {'reason': 'X'}, expected no error"]),
        ({"error": {"reason": "NOT_IMPLEMENTED"}}, {"a": 1}, ["the driver does not have this step"]),
        ({"a": 1}, {"error": {"reason": "X"}}, ["error: is absent; there are a"]),
        ([1], {"a": 1}, ["result: [1], expected {'a': 1}"]),
    ],
)
def test_a_step_that_fails_differs_in_its_error_alone(found: Any, expected: Any, said: list[str]) -> None:
    assert list(step_differences(found, expected, {})) == said


def test_a_rule_that_does_not_exist_is_no_rule_that_holds() -> None:
    with pytest.raises(ValueError, match=r"\$betwen"):
        list(differences(1, {"$betwen": [0, 5]}, {}))


def test_names_and_versions_are_filled_in() -> None:
    """Everywhere, and a name that does not exist is an error."""
    step = {"a": "${b}/x", "c": [{"$version": 2}], "d": 1}
    assert filled(step, {"b": "path"}, 5) == {"a": "path/x", "c": [7], "d": 1}
    with pytest.raises(KeyError):
        filled("${unknown}", {}, 0)
