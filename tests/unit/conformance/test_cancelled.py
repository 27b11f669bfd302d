"""A driver that leaves a call to itself is not one that cancels it."""

import pytest

from clients.conformance.runner.cancelled import CancelledCalls


@pytest.mark.parametrize(
    ("ends", "holds"),
    [([True, False], True), ([False, True], False), ([False, False], False), ([True, True, False], False)],
)
def test_calls_must_be_cancelled_before_the_last_one_ends(ends: list[bool], holds: bool) -> None:
    calls = CancelledCalls(1)
    for was_cancelled in ends:
        calls.ended(was_cancelled)
    assert (calls.differences() == []) == holds
