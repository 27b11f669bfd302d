"""Where new versions are built, from what a worker knows."""

from dataclasses import replace
from pathlib import Path

import pytest

from genserve.config import WAYS
from genserve.worker.placement import GIB, Facts, duration, pause_s, place, refusal

SMALL = Facts(16 * GIB, 2 * GIB, 57 * GIB, 200 * GIB)  # 8 billion parameters on 80 GB
MEDIUM = Facts(28 * GIB, 2 * GIB, 45 * GIB, 200 * GIB)
LARGE = Facts(61 * GIB, 2 * GIB, 12 * GIB, 200 * GIB)
CRAMPED = Facts(61 * GIB, 2 * GIB, 12 * GIB, 60 * GIB)


@pytest.mark.parametrize(
    ("asked", "facts", "way"),
    [
        ("auto", SMALL, "beside"),
        ("auto", MEDIUM, "beside"),
        ("auto", Facts(28 * GIB, 4 * GIB, 45 * GIB, 200 * GIB), "host"),  # a third would not be left
        ("auto", LARGE, "host"),
        ("auto", CRAMPED, "inplace"),
        ("host", SMALL, "host"),
        ("inplace", SMALL, "inplace"),
        ("beside", Facts(28 * GIB, 4 * GIB, 34 * GIB, 0), "beside"),  # asked for: all that is left
    ],
)
def test_the_first_way_that_there_is_memory_for_is_taken(asked: str, facts: Facts, way: str) -> None:
    """And the reason says how much of what it takes, and what it costs in pause."""
    placement = place(asked, facts)
    assert placement.way == way
    assert way in WAYS
    assert "GiB" in placement.reason
    assert "pauses for about" in placement.reason


@pytest.mark.parametrize(
    ("facts", "advised"),
    [
        (SMALL, "--weight-update host gives"),
        (replace(SMALL, quantization="awq"), ""),  # its weights cannot be built on the host
        (replace(MEDIUM, largest=4 * GIB), "--weight-update beside shortens"),
        (LARGE, "more devices would shorten"),  # beside would refuse to start
    ],
)
def test_no_flag_is_advised_that_would_be_refused(facts: Facts, advised: str) -> None:
    """What the reason recommends can be had."""
    reason = place("auto", facts).reason
    assert advised in reason
    assert advised or "--weight-update" not in reason


@pytest.mark.parametrize(
    ("asked", "facts", "says"),
    [
        ("beside", LARGE, "--weight-update beside needs 63.0 GiB of the 12.0 GiB that the device has left"),
        ("host", CRAMPED, "--weight-update host needs 67.1 GiB of the host's memory for each rank, and 60.0 GiB"),
    ],
)
def test_a_way_that_was_asked_for_and_cannot_be_had_is_refused(asked: str, facts: Facts, says: str) -> None:
    """With the flag's other values."""
    with pytest.raises(ValueError, match=says):
        place(asked, facts)


@pytest.mark.parametrize(
    ("asked", "host", "way"),
    [("auto", 3, "beside"), ("auto", 1, "inplace"), ("beside", 1, "beside"), ("inplace", 3, "inplace")],
)
def test_on_the_cpu_all_memory_is_the_hosts(asked: str, host: int, way: str) -> None:
    """There is no device to build beside on, and nothing to copy over."""
    assert place(asked, Facts(2 * GIB, 0, None, host * GIB)).way == way


@pytest.mark.parametrize(
    ("quantization", "way", "refused"),
    [
        (None, "host", False),
        (None, "inplace", False),
        ("fp8", "beside", False),
        ("fp8", "host", True),
        ("gptq_marlin", "host", True),
        ("awq", "host", True),
        ("compressed-tensors", "host", True),
        ("compressed-tensors", "inplace", False),
        ("awq", "inplace", False),
        ("fp8", "inplace", False),
        ("fp8_per_tensor", "inplace", True),
        ("fp8_per_tensor", "beside", False),
    ],
)
def test_kernels_of_the_device_cannot_pack_what_is_built_on_the_host(
    quantization: str | None, way: str, refused: bool
) -> None:
    """Told when the way is chosen, not at the first push."""
    reason = refusal(quantization, way, is_online=quantization == "fp8_per_tensor")
    assert (reason is not None) == refused
    if reason is not None:
        assert str(quantization) in reason and "room" in reason


def test_a_way_that_cannot_build_these_weights_is_not_taken() -> None:
    """Beside takes all that is left rather than none; where it does not fit either, the start fails."""
    fp8 = Facts(28 * GIB, 4 * GIB, 45 * GIB, 200 * GIB, "fp8", is_online=True)
    assert place("auto", fp8).way == "beside"
    assert place("auto", Facts(61 * GIB, 2 * GIB, 12 * GIB, 200 * GIB, "awq")).way == "inplace"
    assert place("auto", Facts(61 * GIB, 2 * GIB, 12 * GIB, 200 * GIB, "fp8")).way == "inplace"  # quantised already
    for asked, facts in (("host", fp8), ("auto", Facts(61 * GIB, 2 * GIB, 12 * GIB, 200 * GIB, "fp8", is_online=True))):
        with pytest.raises(ValueError, match="weights"):
            place(asked, facts)


MODELS = {"8B": (15.0, 0.98), "14B": (27.5, 1.45), "32B": (61.0, 1.45), "70B": (131.4, 1.96)}
"""Weights and largest tensor (the embedding), in GiB."""


def test_the_table_of_the_guide_is_what_is_computed() -> None:
    """Every row of docs/gpu.md, from the models' sizes."""
    page = (Path(__file__).parents[3] / "docs/gpu.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] in MODELS]
    assert len(rows) == 7
    for row in rows:
        weights_gib, largest_gib = (size / int(row[1]) for size in MODELS[row[0]])
        left_gib = 0.92 * 79.1 - weights_gib - 1.5
        facts = Facts(*(int(size * GIB) for size in (weights_gib, largest_gib, left_gib, 1000.0)))
        way = place("auto", facts).way
        kept_gib = largest_gib + (weights_gib if way == "beside" else 0)
        pauses = [duration(pause_s(each, facts.weights)) for each in WAYS]
        if weights_gib + largest_gib > left_gib:
            pauses[0] = ""
        sizes = [f"{size:.1f} GiB" for size in (weights_gib, left_gib, left_gib - kept_gib)]
        assert row[2:] == [sizes[0], sizes[1], way, sizes[2], *pauses]
