"""Where new versions are built, from what a worker knows."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from genserve.settings.config import WAYS, WEIGHT_UPDATES
from genserve.worker.contract.placement import ACTIVATION_BYTES, GIB, RING_BYTES, WorkerFacts, duration, pause_s, place
from genserve.worker.update.pinned_ring import NUM_SLOTS, SLOT_BYTES

SMALL = WorkerFacts(16 * GIB, 2 * GIB, 57 * GIB, 200 * GIB)  # 8 billion parameters on 80 GB
MEDIUM = WorkerFacts(28 * GIB, 2 * GIB, 45 * GIB, 200 * GIB)
LARGE = WorkerFacts(61 * GIB, 2 * GIB, 12 * GIB, 200 * GIB)
CRAMPED = WorkerFacts(61 * GIB, 2 * GIB, 12 * GIB, 60 * GIB)


@pytest.mark.parametrize(
    ("asked", "facts", "way"),
    [
        ("auto", SMALL, "beside"),
        ("auto", MEDIUM, "beside"),
        ("auto", WorkerFacts(28 * GIB, 4 * GIB, 45 * GIB, 200 * GIB), "host"),  # a third would not be left
        ("auto", LARGE, "host"),
        ("auto", CRAMPED, "inplace"),
        ("host", SMALL, "host"),
        ("inplace", SMALL, "inplace"),
        ("beside", WorkerFacts(28 * GIB, 4 * GIB, 34 * GIB, 0), "beside"),  # asked for: all that is left
    ],
)
def test_the_first_way_that_there_is_memory_for_is_taken(asked: str, facts: WorkerFacts, way: str) -> None:
    """And the reason says how much of what it takes, and what it costs in pause."""
    placement = place(asked, facts)
    assert placement.way == way
    kept = (facts.weight_bytes + (facts.largest_bytes if way == "beside" else 0)) / GIB
    assert way == "inplace" or f"{kept:.1f} GiB" in placement.reason
    assert f"pauses for about {duration(pause_s(way, facts.weight_bytes))} (computed)" in placement.reason


@pytest.mark.parametrize(
    ("facts", "advised"),
    [
        (SMALL, "--weight-update host gives"),
        (replace(MEDIUM, largest_bytes=4 * GIB), "--weight-update beside shortens"),
        (LARGE, "more devices would shorten"),  # beside would refuse to start
        (replace(MEDIUM, largest_bytes=4 * GIB, cpu_bytes=0), "--weight-update beside shortens"),  # inplace
    ],
)
def test_the_other_way_is_told_of(facts: WorkerFacts, advised: str) -> None:
    """Where there is one."""
    assert advised in place("auto", facts).reason


PLAIN = [replace(SMALL, left_bytes=left * GIB, cpu_bytes=host * GIB) for left in (10, 19, 25, 57) for host in (10, 200)]
QUANTISED = [replace(facts, quantization="awq") for facts in PLAIN]
ONLINE = [replace(facts, quantization="fp8", is_online=True) for facts in PLAIN]
FIXED_CACHE = [replace(facts, kv_cache_bytes=kv * GIB) for facts in (*PLAIN, *ONLINE) for kv in (1, 20)]


@pytest.mark.parametrize("asked", WEIGHT_UPDATES)
def test_no_flag_is_advised_that_would_be_refused(asked: str) -> None:
    """What a reason or an error recommends can be had, and an error recommends something."""
    for facts in (*PLAIN, *QUANTISED, *ONLINE, *FIXED_CACHE):
        try:
            assert_advice_can_be_taken(facts, asked)
        except AssertionError as error:
            error.add_note(f"of {facts}")
            raise


def assert_advice_can_be_taken(facts: WorkerFacts, asked: str) -> None:
    """That of one worker."""
    try:
        text, is_error = place(asked, facts).reason, False
    except ValueError as error:
        text, is_error = str(error), True
        assert text.startswith(f"--weight-update {asked} ")
        assert " take " in text or " lower " in text
    for way in set(re.findall(r"--weight-update (beside|host|inplace)", text)) - {asked}:
        assert place(way, facts).way == way
    possible = {way for way in WAYS if _is_taken(way, facts)}
    if is_error and asked != "auto":
        assert {way for way in WAYS if f"take --weight-update {way}" in text} == possible
    if "--kv-cache-memory-bytes" in text:
        assert facts.kv_cache_bytes > 0
        assert facts.left_bytes is not None
        assert _is_taken("beside", replace(facts, left_bytes=facts.left_bytes + facts.kv_cache_bytes - 1))
    assert not ("more devices" in text and facts.is_online)  # refused with whole scales, by the engine
    assert not ("quantised already" in text and not facts.is_online)


def _is_taken(way: str, facts: WorkerFacts) -> bool:
    try:
        return place(way, facts).way == way
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("asked", "facts", "says"),
    [
        (
            "beside",
            LARGE,
            "--weight-update beside needs 63.0 GiB of the 12.0 GiB that the device has left beside the weights, and "
            "2.0 GiB for activations and graphs: take --weight-update host, or take --weight-update inplace, or take "
            "more devices",
        ),
        (
            "host",
            CRAMPED,
            "--weight-update host needs 67.1 GiB of the 60.0 GiB that the host has for this rank, and 0.5 GiB for "
            "everything else: take --weight-update inplace, or take a host with more memory",
        ),
        (
            "beside",
            replace(SMALL, left_bytes=19 * GIB, kv_cache_bytes=2 * GIB, quantization="fp8", is_online=True),
            "--weight-update beside needs 18.0 GiB of the 19.0 GiB that the device has left beside the weights, and "
            "2.0 GiB for activations and graphs: lower --kv-cache-memory-bytes, or take a device with more memory, or "
            "take a checkpoint that is quantised already",
        ),
    ],
)
def test_a_way_that_was_asked_for_and_cannot_be_had_is_refused(asked: str, facts: WorkerFacts, says: str) -> None:
    """With all that it needs, what there is, and what to do."""
    with pytest.raises(ValueError, match="--weight-update") as error:
        place(asked, facts)
    assert str(error.value) == says


@pytest.mark.parametrize("asked", ["auto", "inplace"])
def test_in_place_is_told_what_kept_from_the_other_ways(asked: str) -> None:
    """What is asked for needs no reason; weights that the host cannot pack are no matter of its memory."""
    reason = place(asked, replace(LARGE, quantization="awq")).reason
    packed = "host cannot be taken, as weights in awq are packed by kernels of the device"
    assert ("as --weight-update says" in reason, packed in reason) == (asked == "inplace", asked == "auto")
    assert "200.0 GiB" not in reason


@pytest.mark.parametrize(
    ("asked", "host", "way"),
    [("auto", 3, "beside"), ("auto", 1, "inplace"), ("beside", 1, "beside"), ("inplace", 3, "inplace")],
)
def test_on_the_cpu_all_memory_is_the_hosts(asked: str, host: int, way: str) -> None:
    """There is no device to build beside on, and nothing to copy over."""
    assert place(asked, WorkerFacts(2 * GIB, 0, None, host * GIB)).way == way


def test_a_way_that_cannot_build_these_weights_is_not_taken() -> None:
    """Told when the way is chosen, not at the first push. Beside takes all that is left rather than none; where it does
    not fit either, the start fails. What is quantised already can be taken in place."""
    fp8 = WorkerFacts(28 * GIB, 4 * GIB, 45 * GIB, 200 * GIB, "fp8", is_online=True)
    assert place("auto", fp8).way == "beside"
    assert place("auto", WorkerFacts(61 * GIB, 2 * GIB, 12 * GIB, 200 * GIB, "awq")).way == "inplace"
    quantised_already = WorkerFacts(61 * GIB, 2 * GIB, 12 * GIB, 200 * GIB, "fp8")
    assert place("auto", quantised_already).way == "inplace"
    awq = WorkerFacts(28 * GIB, 4 * GIB, 45 * GIB, 200 * GIB, "awq")
    nowhere = WorkerFacts(61 * GIB, 2 * GIB, 12 * GIB, 200 * GIB, "fp8", is_online=True)
    for asked, facts in (("host", awq), ("host", fp8), ("inplace", fp8), ("auto", nowhere)):
        with pytest.raises(ValueError, match=f"weights .*{facts.quantization}"):
            place(asked, facts)


MODELS = {"8B": (15.0, 0.98), "14B": (27.5, 1.45), "32B": (61.0, 1.45), "70B": (131.4, 1.96)}
"""Weights and largest tensor (the embedding), in GiB."""


def test_the_table_of_the_guide_is_what_is_computed() -> None:
    """Every row of docs/gpu.md, from the models' sizes."""
    page = (Path(__file__).parents[4] / "docs/gpu.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] in MODELS]
    assert len(rows) == 7
    assert "`--gpu-memory-utilization 0.92` and 2 GiB for activations" in page
    assert ACTIVATION_BYTES == 2 * GIB
    for row in rows:
        weights_gib, largest_gib = (size / int(row[1]) for size in MODELS[row[0]])
        left_gib = 0.92 * 79.1 - weights_gib
        facts = WorkerFacts(*(int(size * GIB) for size in (weights_gib, largest_gib, left_gib, 1000.0)))
        way = place("auto", facts).way
        kept_gib = largest_gib + (weights_gib if way == "beside" else 0) + ACTIVATION_BYTES / GIB
        pauses = [duration(pause_s(each, facts.weight_bytes)) for each in WAYS]
        if not _is_taken("beside", facts):
            pauses[0] = ""
        sizes = [f"{size:.1f} GiB" for size in (weights_gib, left_gib, left_gib - kept_gib)]
        assert row[2:] == [sizes[0], sizes[1], way, sizes[2], *pauses]


def test_the_ring_is_as_large_as_is_said() -> None:
    """Who has no torch computes with it."""
    assert NUM_SLOTS * SLOT_BYTES == RING_BYTES
