"""Python values that become fields, and how one that cannot is named."""

import math
from collections.abc import Callable
from typing import Any, TypedDict

import pytest

from genserve.errors import InvalidFieldError
from genserve.transport.fields import (
    build,
    check_count,
    duration,
    is_seconds,
    naming,
    optional_duration,
    refuse_unknown,
)
from genserve.v1 import generation_pb2, weights_pb2


def violation(action: Callable[[], object]) -> tuple[str, str]:
    """The field that an error names, and what it says of it."""
    with pytest.raises(InvalidFieldError) as caught:
        action()
    (found,) = caught.value.violations
    return found.field, found.description


def test_fields_that_are_none_are_not_set() -> None:
    """The daemon has its defaults."""
    header = build(weights_pb2.PushHeader, {"push_id": "p", "expected_version": None, "force": None})
    assert header == weights_pb2.PushHeader(push_id="p")
    assert not header.HasField("expected_version")


def test_a_value_that_does_not_fit_is_named_by_field_and_option() -> None:
    """Whatever is beside it. The value itself says enough where both have one name."""
    kind, options = weights_pb2.PushHeader, {"weight_version": "version"}
    field, text = violation(lambda: build(kind, {"push_id": "p", "weight_version": -1}))
    assert field == "weight_version" and text.startswith("-1: ")
    field, text = violation(lambda: build(kind, {"push_id": "p", "weight_version": -1}, path="header"))
    assert field == "header.weight_version" and text.startswith("-1: ")
    field, text = violation(lambda: build(kind, {"weight_version": "x"}, options=options))
    assert field == "weight_version" and text.startswith("version='x': ")


@pytest.mark.parametrize("value", ["ab", b"ab", {"a": 1}])
def test_text_is_no_sequence(value: object) -> None:
    """protobuf would take its letters one by one."""
    field, text = violation(lambda: build(generation_pb2.Stop, {"strings": value}))
    assert field == "strings" and repr(value) in text
    assert build(generation_pb2.Stop, {"strings": ["ab"]}).strings == ["ab"]
    assert build(generation_pb2.Sampling, {"logit_bias": {1: 2.0}}).logit_bias == {1: 2.0}


def test_an_error_of_another_module_is_about_the_field() -> None:
    """By its text, or its kind if it has none."""

    def raising(error: Exception) -> None:
        with naming("a.b"):
            raise error

    assert violation(lambda: raising(TypeError("no number"))) == ("a.b", "no number")
    assert violation(lambda: raising(RecursionError())) == ("a.b", "RecursionError")
    with pytest.raises(KeyError):
        raising(KeyError("a bug"))


def test_unknown_options_are_named_in_order() -> None:
    """As Python does."""

    class Options(TypedDict, total=False):
        known: int

    refuse_unknown({"known": 1}, Options)
    with pytest.raises(TypeError, match=r"\ba, b$"):
        refuse_unknown({"b": 1, "known": 2, "a": 3}, Options)


def test_an_option_that_is_misspelt_is_reported_with_the_one_that_is_meant() -> None:
    """Each once. One that it begins is meant, however long that is."""

    class Options(TypedDict, total=False):
        logprobs: int
        max_tokens: int

    with pytest.raises(TypeError, match=r"\blogprob; .*\blogprobs\b"):
        refuse_unknown({"logprob": 0}, Options)
    with pytest.raises(TypeError, match=r"\bmax; .*\bmax_tokens\b"):
        refuse_unknown({"max": 1}, Options)
    with pytest.raises(TypeError, match=r"\blog_probs, logprob, x; .*\blogprobs\b"):
        refuse_unknown({"logprob": 0, "log_probs": 0, "x": 0}, Options)


@pytest.mark.parametrize("value", [1, 2**31 - 1])
def test_a_count_is_above_0_and_fits_32_bits(value: int) -> None:
    """With its sign."""
    check_count(value, "streams")


@pytest.mark.parametrize("value", [0, -1, 2**31, 1.0, "1", None])
def test_what_is_no_count_is_named_by_its_option(value: object) -> None:
    """It is told as it was given."""
    field, text = violation(lambda: check_count(value, "streams"))
    assert field == "streams" and text.startswith(repr(value))


@pytest.mark.parametrize("seconds", [0, 1.5, -2, 315_576_000_000.0, -315_576_000_000.0])
def test_seconds_are_a_duration(seconds: float) -> None:
    """To the nanosecond, up to what a Duration holds."""
    assert duration(seconds, "ttl_s").ToNanoseconds() == round(seconds * 1e9)
    assert optional_duration(seconds, "ttl_s") == duration(seconds, "ttl_s")


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 315_576_000_001.0, "1", [], 1j])
def test_what_is_no_duration_is_named_by_its_option(seconds: Any) -> None:
    """And None is one that was not given."""
    assert violation(lambda: duration(seconds, "ttl_s"))[0] == "ttl_s"
    assert violation(lambda: optional_duration(seconds, "ttl_s"))[0] == "ttl_s"
    assert optional_duration(None, "ttl_s") is None


def test_infinity_is_a_number_of_seconds() -> None:
    """A deadline may be as far away."""
    assert is_seconds(math.inf) and is_seconds(0) and not is_seconds(math.nan) and not is_seconds("1")
