"""What the runner says of drivers that print different things."""

from clients.conformance.runner.run import add_disagreements
from clients.conformance.runner.scenario import Scenario
from clients.conformance.runner.table import Outcome

SCENARIO = Scenario("s", "", [{"do": "status", "expect": {}}, {"do": "pull", "expect": {}, "may_differ": True}])


def test_drivers_that_do_as_the_scenario_says_must_print_the_same() -> None:
    outcomes = {name: Outcome() for name in "abc"}
    add_disagreements(outcomes, {"a": [1, 1], "b": [2, 2], "c": [1, 3]}, SCENARIO)
    assert outcomes["b"].differences == ["step 1, status: a printed 1, and this one 2"]
    assert not outcomes["a"].differences and not outcomes["c"].differences


def test_a_driver_does_not_fail_because_another_one_did() -> None:
    """Whichever of them comes first."""
    outcomes = {"wrong": Outcome(["step 1, status: failed"]), "right": Outcome(), "wrong-too": Outcome(["late"])}
    add_disagreements(outcomes, {"wrong": [0, 0], "right": [1, 1], "wrong-too": []}, SCENARIO)
    assert {name: outcome.word for name, outcome in outcomes.items()} == {
        "wrong": "FAILED",
        "right": "ok",
        "wrong-too": "FAILED",
    }
    assert len(outcomes["wrong-too"].differences) == 1
