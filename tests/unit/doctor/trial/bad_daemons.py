"""Daemons with which something is wrong, and what the doctor says then."""

from dataclasses import replace

from genserve.doctor.trial.findings import MustFail, WayFound
from genserve.doctor.verdict import Level
from tests.unit.doctor.conftest import memory, push, snapshot, way

OTHER_TOKENS = ((9, 9), (9, 9))
B = snapshot("b")
LATE = MustFail("DEADLINE_EXCEEDED", "no time was left", B, B)
BAD: list[tuple[str, WayFound, Level, str]] = [
    ("start", WayFound("beside", "a", error="the daemon ended with status 1"), Level.FAIL, "ended with status 1"),
    ("start", way(info={"weight_update": "inplace"}), Level.FAIL, "'inplace' instead of 'beside'"),
    (
        "start",
        way(info={"weight_update": "beside", "device": "cuda", "pinned_host_bytes": 0}),
        Level.WARN,
        "no page-locked memory",
    ),
    (
        "reach",
        way(info={"weight_update": "beside", "model_memory": memory(hidden_bytes=700_000)}),
        Level.FAIL,
        "2.0 are constant and 0.7 are none of these",
    ),
    ("transport", way(pushes=[push("b", shared="it runs elsewhere")]), Level.WARN, "it runs elsewhere"),
    ("greedy tokens", way(pushed=[replace(B, tokens=OTHER_TOKENS)]), Level.FAIL, "after a push of b"),
    (
        "weights",
        way(pushed=[replace(B, digests={("tp0", "w"): "b1", ("tp0", "v"): "a2"})]),
        Level.FAIL,
        "other values in tp0 v",
    ),
    ("weights", way(pushed=[replace(B, digests={("tp0", "w"): "b1"})]), Level.FAIL, "gone is tp0 v"),
    (
        "weights",
        way(pushed=[replace(B, digests={**B.digests, ("tp0", "x"): "1"})]),
        Level.FAIL,
        "new is tp0 x",
    ),
    ("weights", way(pushed=[replace(B, digests={})]), Level.WARN, "could not be compared"),
    ("labels", way(pushed=[replace(B, labelled=False)]), Level.FAIL, "a version that was not served"),
    ("labels", way(pushes=[push("b", labels_ok=False)]), Level.FAIL, "a version that was not served"),
    ("streams", way(pushes=[push("b", lost="ENGINE_DEAD")]), Level.FAIL, "ENGINE_DEAD"),
    ("streams", way(pushes=[push("b", requests_aborted=2)]), Level.FAIL, "2 were aborted"),
    ("streams", way(pushes=[push("b", requests_kept=0)]), Level.WARN, "no request was running"),
    ("pause", way(pushes=[push("b", paused_s=1.5)]), Level.WARN, "p50 1500.0 ms"),
    ("inter-token latency", way(pushes=[push("b", waits_s=[0.2] * 9)]), Level.WARN, "200.0/200.0 ms while preparing"),
    ("inter-token latency", way(pushes=[push("b", waits_s=[])]), Level.WARN, "no token came"),
    ("a misshapen tensor", way(misshapen=MustFail("", "", B, B)), Level.FAIL, "it was accepted"),
    ("a misshapen tensor", way(misshapen=MustFail("INTERNAL", "KeyError", B, B)), Level.FAIL, "INTERNAL: KeyError"),
    (
        "a misshapen tensor",
        way(misshapen=MustFail("MANIFEST_MISMATCH", "", B, snapshot("a"))),
        Level.FAIL,
        "something else is served",
    ),
    ("a push that ends late", way(late=replace(LATE, after=None)), Level.FAIL, "did not answer afterwards"),
    ("a push that ends late", way(late=replace(LATE, reason="INTERNAL")), Level.FAIL, "INTERNAL: no time"),
    (
        "a push that ends late",
        way(late=replace(LATE, after=replace(B, tokens=OTHER_TOKENS))),
        Level.FAIL,
        "something else is served",
    ),
    (
        "a push that ends late",
        way(late=replace(LATE, after=replace(B, digests={}))),
        Level.FAIL,
        "something else is served",
    ),
    (
        "a push that ends late",
        way(late=replace(LATE, after=replace(B, labelled=False))),
        Level.FAIL,
        "something else is served",
    ),
    ("a push that ends late", way(late=replace(LATE, reason="")), Level.WARN, "this proves nothing"),
    ("checks", way(error="ENGINE_DEAD: the engine has died"), Level.FAIL, "ENGINE_DEAD"),
    ("stop", way(stopped="it had to be killed"), Level.FAIL, "had to be killed"),
]
