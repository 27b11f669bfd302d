"""What the types of a push say by themselves: their defaults, and what is computed from them."""

from genserve.control.pause import Hold
from genserve.engine.types import KvPolicy, PauseMode
from genserve.weights.push.types import (
    Applied,
    ApplyOptions,
    HoldOptions,
    LoraAdapter,
    PushAction,
    PushHeader,
    PushReport,
    PushState,
)
from tests.support.scripted_engine import ScriptedInterruption
from tests.unit.weights.conftest import MANIFEST, header


def test_a_header_that_says_nothing_has_the_defaults_of_the_contract() -> None:
    """Applied at once, without force, from one stream; five minutes for each half."""
    bare = PushHeader("p1", 7)
    assert (bare.action, bare.force, bare.num_streams, bare.staging_ttl_s) == (PushAction.APPLY, False, 1, 300.0)
    assert (bare.expected_version, bare.manifest, bare.manifest_digest, bare.attempt) == (None, None, "", "")
    assert (bare.lora, bare.lora_name) == (None, "")
    assert bare.apply == ApplyOptions(PauseMode.KEEP, KvPolicy.RECOMPUTE, "", 300.0)
    assert HoldOptions() == HoldOptions(PauseMode.KEEP, KvPolicy.RECOMPUTE, "")


def test_only_an_adapter_has_a_name() -> None:
    """Weights have a version instead."""
    assert header(lora=LoraAdapter("policy", "{}")).lora_name == "policy"


def test_a_dry_run_reports_what_would_arrive() -> None:
    """Nothing has; and a header without a manifest announces nothing."""
    report = PushReport.valid(header("dry", 7), "digest")
    assert report == PushReport("dry", PushState.VALID, 7, 0, MANIFEST.total_bytes, manifest_digest="digest")
    assert PushReport.valid(header("dry", 7, manifest=None), "digest").total_bytes == 0


def test_what_was_applied_tells_of_the_hold_what_it_did() -> None:
    """Each number by its own name."""
    hold = Hold(1, 2, wait_s=9.0, pause_s=3.0, resume_s=4.0, paused_s=5.0, drops=True)
    hold.interruption = ScriptedInterruption()
    applied = Applied.in_hold(6, 7, {"pause": 3.0, "commit": 8.0}, hold)
    assert applied == Applied(
        previous_version=6,
        active_version=7,
        step_s={"pause": 3.0, "commit": 8.0},
        paused_s=5.0,
        requests_kept=1,
        requests_aborted=2,
        recomputed_tokens=7,
    )
