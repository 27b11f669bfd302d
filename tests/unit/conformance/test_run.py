"""What drivers print is compared among them, whatever it is."""

from typing import Any

import pytest

from clients.conformance.runner.run import _relative


@pytest.mark.parametrize(
    ("printed", "compared"),
    [
        ({"version": 7, "tensors": 7}, {"version": 2, "tensors": 7}),
        ({"a": [{"weight_spans": [[5, 0, 1], [6, 1, 2]]}]}, {"a": [{"weight_spans": [[0, 0, 1], [1, 1, 2]]}]}),
        ({"weight_spans": [5, [], ["x", 5], None, {"version": 6}]},
         {"weight_spans": [5, [], ["x", 5], None, {"version": 1}]}),
        ({"version": "7", "weight_spans": 5}, {"version": "7", "weight_spans": 5}),
        (["version", None, 7], ["version", None, 7]),
    ],
)  # fmt: skip
def test_versions_count_from_the_one_at_the_beginning(printed: Any, compared: Any) -> None:
    """Where there is one: a driver may print anything."""
    assert _relative(printed, 5) == compared
