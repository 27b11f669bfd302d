"""Each check of a daemon that was pushed to can fail, says what was seen, and what to do."""

from dataclasses import replace

import pytest

from genserve.doctor.trial.findings import Snapshot, WayFound
from genserve.doctor.trial.verdicts import cold_starts, way_verdicts
from genserve.doctor.verdict import Level, Verdict
from genserve.worker.contract.placement import pause_s
from tests.unit.doctor.conftest import memory, push, snapshot, way
from tests.unit.doctor.trial.bad_daemons import BAD, OTHER_TOKENS, B


def verdicts(found: WayFound, cold: dict[str, Snapshot], *, expect_cold: bool = True) -> dict[str, Verdict]:
    """By the name of the check."""
    return {verdict.check: verdict for verdict in way_verdicts(found, cold, expect_cold=expect_cold)}


def test_a_daemon_that_does_all_as_it_should_is_ok(cold: dict[str, Snapshot]) -> None:
    """In every check."""
    assert {verdict.level for verdict in verdicts(way(), cold).values()} == {Level.OK}


def test_the_bytes_that_a_model_reaches_are_told_in_words_and_figures(cold: dict[str, Snapshot]) -> None:
    """In all, and by what a push does with them."""
    told = verdicts(way(), cold)["reach"]
    assert told.finding == (
        "of 9002.0 MB that the model reaches, 3000.0 are exchanged, 6000.0 are keys and values, 2.0 are constant and "
        "0.0 are none of these"
    )
    assert told.figures == memory()
    assert "reach" not in verdicts(way(info={"weight_update": "beside", "device": "cuda"}), cold)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_the_model_runner_is_told_where_the_daemon_tells_it(cold: dict[str, Snapshot], runner: str) -> None:
    """A report about wrong tokens needs it."""
    info = {**way().info, "model_runner": runner}
    assert verdicts(way(info=info), cold)["start"].finding == f"served after 12 s on cuda, model runner {runner}"
    assert verdicts(way(), cold)["start"].finding == "served after 12 s on cuda"


@pytest.mark.parametrize(("check", "found", "level", "words"), BAD)
def test_what_is_wrong_is_reported_with_what_to_do(
    cold: dict[str, Snapshot], check: str, found: WayFound, level: Level, words: str
) -> None:
    """And nothing else is wrong then."""
    told = verdicts(found, cold)
    assert told[check].level is level
    assert words in told[check].finding
    assert told[check].advice != ""
    assert {each.level for name, each in told.items() if name != check} <= {Level.OK}


def test_every_check_is_seen_to_fail(cold: dict[str, Snapshot]) -> None:
    """None is forgotten above."""
    checks = {verdict.check for _, found, _, _ in BAD for verdict in way_verdicts(found, cold, expect_cold=True)}
    assert checks == {check for check, *_ in BAD}


def test_pushes_of_one_version_must_agree_even_without_a_cold_start(cold: dict[str, Snapshot]) -> None:
    """A model of the user's own has no cold start of b."""
    found = way(pushed=[B, snapshot("a"), replace(B, tokens=OTHER_TOKENS)])
    told = verdicts(found, {"a": cold["a"]}, expect_cold=False)["greedy tokens"]
    assert (told.level, told.finding) == (Level.FAIL, "two pushes of b gave different ones")


def test_versions_that_say_the_same_prove_nothing(cold: dict[str, Snapshot]) -> None:
    """A push that does nothing would look as good."""
    same = {name: replace(each, tokens=OTHER_TOKENS) for name, each in cold.items()}
    found = way(cold=same["a"], pushed=[same["b"], same["a"]])
    assert verdicts(found, same)["greedy tokens"].level is Level.WARN


def test_a_push_that_leaves_all_as_it_was_is_seen_without_a_cold_start(cold: dict[str, Snapshot]) -> None:
    """A model of the user's own: b has none, and holds something else than a."""
    found = way(pushed=[replace(B, digests=cold["a"].digests), snapshot("a")])
    told = verdicts(found, {"a": cold["a"]}, expect_cold=False)["weights"]
    assert (told.level, told.finding) == (Level.FAIL, "after a push of b the workers hold the same as after a")


def test_a_cold_start_that_failed_is_missed_where_there_should_be_one(cold: dict[str, Snapshot]) -> None:
    """What was compared is told, and what was not."""
    a_alone = {"a": cold["a"]}
    expected = verdicts(way(), a_alone)["greedy tokens"]
    assert (expected.level, expected.finding) == (Level.WARN, "no daemon started on b to compare with")
    unexpected = verdicts(way(), a_alone, expect_cold=False)["greedy tokens"]
    assert unexpected.level is Level.OK
    assert "1 of 3 pushes compared" in unexpected.finding


def test_a_daemon_that_does_not_start_is_told_of_alone(cold: dict[str, Snapshot]) -> None:
    """Its error is in the one verdict."""
    assert list(verdicts(WayFound("beside", "a", error="no memory"), cold)) == ["start"]


def test_cold_starts_are_those_of_the_daemons_that_said_something() -> None:
    """The first of each checkpoint."""
    found = [way(), way(started_on="b", cold=None), way(started_on="b", cold=B), way(cold=replace(B, name="a"))]
    assert cold_starts(found) == {"a": snapshot("a"), "b": B}


OWN_BYTES = 50e9
"""Of a model of the user's on each rank; in host, that takes seconds by any computation."""


@pytest.mark.parametrize(
    ("device", "way_name", "times_computed", "own_bytes", "level"),
    [
        ("cuda", "host", 1.5, OWN_BYTES, Level.OK),
        ("cuda", "host", 2.5, OWN_BYTES, Level.WARN),
        ("cuda", "inplace", 1.5, OWN_BYTES, Level.OK),
        ("cuda", "host", 1.5, 0.0, Level.WARN),  # the built-in model: milliseconds
        ("cpu", "inplace", 2.5, OWN_BYTES, Level.OK),  # loads within the pause
        ("cpu", "inplace", 2.5, 0.0, Level.WARN),
        ("cpu", "beside", 2.5, OWN_BYTES, Level.WARN),  # pointers change places, whatever the size
    ],
)
def test_a_pause_is_held_against_what_the_model_takes(
    cold: dict[str, Snapshot], device: str, way_name: str, times_computed: float, own_bytes: float, level: Level
) -> None:
    """Of a model of the user's; half a second for any."""
    paused_s = times_computed * pause_s(way_name if way_name != "beside" else "host", int(OWN_BYTES))
    assert paused_s > 1.0
    found = way(way=way_name, info={"device": device}, pushes=[push("b", paused_s=paused_s)])
    told = {each.check: each for each in way_verdicts(found, cold, expect_cold=True, own_bytes=own_bytes)}["pause"]
    assert told.level is level
    assert ("milliseconds" in told.advice) == (level is Level.WARN and (own_bytes == 0.0 or device == "cpu"))
    assert ("computed" in told.finding) == (own_bytes > 0 and device == "cuda")


def test_a_pause_of_less_than_half_a_second_is_never_long(cold: dict[str, Snapshot]) -> None:
    """Also where the copies would take less: requests and the step under way take their time."""
    found = way(pushes=[push("b", paused_s=0.45)])
    assert pause_s("beside", 10**9) < 0.1
    told = {each.check: each for each in way_verdicts(found, cold, expect_cold=True, own_bytes=1e9)}
    assert told["pause"].level is Level.OK
