"""The files of scenarios, and what is wrong with one."""

import json
from pathlib import Path
from typing import Any

import pytest

from clients.conformance.runner.scenario import Scenario, all_scenarios

STEP = {"do": "status", "expect": {}}


def test_there_are_scenarios_and_a_driver_sees_nothing_of_what_is_expected() -> None:
    assert len(all_scenarios()) >= 20
    names = dict.fromkeys(["a", "b", "half_of_b", "rest_of_b", "renamed", "reshaped", "adapter", "run"], "x")
    for scenario in all_scenarios():
        assert "expect" not in json.dumps(scenario.for_driver(names, 0)).replace("expected_version", "")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": [STEP], "titel": "x"}, "titel"),
        ({"steps": [STEP], "link": {"cut_at": 1}}, "cut_at"),
        ({"steps": [STEP], "link": {"cut_at_bytes": 1, "serve": 1}}, "serve"),
        ({"steps": []}, "step"),
        ({"steps": [STEP], "link": {"deadline_ms": 1, "corrupt_chunk": 1}}, "link"),
        ({"steps": [STEP], "daemon": "closed"}, "closed"),
        ({"steps": [{"do": "status"}]}, "status"),
        ({"steps": [STEP], "daemon": "secured", "after": {"weights": "a", "version": 0}}, "open daemon"),
    ],
)
def test_a_scenario_that_would_check_nothing_is_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"title": "x", **fields}))
    with pytest.raises(ValueError, match=said):
        Scenario.load(path)
