"""One run of a scenario: whatever drivers print, and whatever becomes of the daemon, there is a table."""

import socket
from typing import Any

import pytest

from clients.conformance.runner.daemons import Daemons
from clients.conformance.runner.run import Run, relative
from clients.conformance.runner.scenario import all_scenarios
from clients.conformance.runner.table import Outcome, table


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
    assert relative(printed, 5) == compared


async def test_a_daemon_that_has_ended_is_a_difference() -> None:
    """In the row of every driver; the other rows stay."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        daemons = Daemons(f"127.0.0.1:{unused.getsockname()[1]}", "", {}, {}, {})
        scenario = next(each for each in all_scenarios() if each.name == "stream")
        async with Run.against(daemons) as run:
            outcomes = await run.scenario(scenario, {"c": ("true",), "go": ("true",)})
    assert all("own call has failed: no daemon answers" in each.differences[0] for each in outcomes.values()), outcomes
    assert outcomes.keys() == {"c", "go"}


def test_a_difference_takes_one_line_of_the_table() -> None:
    shown = table({"stream": {"c": Outcome(["1: " + "x" * 100_000, "a\nb\rc"])}}, ["c"]).splitlines()
    assert [line[:14] for line in shown] == [
        "scenario  c",
        "stream    FAIL",
        "          0 of",
        "stream, c: 1: ",
        "stream, c: a b",
    ]
    assert max(map(len, shown)) < 2100
