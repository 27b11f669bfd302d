"""The soak: a short one passes, and a report finds what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.soak.report import MAX_GROWTH_BYTES, Report, Sample
from bench.soak.run import Load, draw, soak

SECONDS = 25.0


def report_of(*private_bytes: int) -> Report:
    """A soak whose only process had so much memory at each sample."""
    report = Report({}, {})
    for number, size in enumerate(private_bytes):
        one: dict[str, Any] = {key: {"daemon": size} for key in ("rss_bytes", "private_bytes", "open_files", "threads")}
        report.samples.append(Sample(float(number), **one, **dict.fromkeys(OTHERS, 0)))  # type: ignore[arg-type]
    return report


OTHERS = ("shared_files", "arena_bytes", "weight_version", "running", "waiting", "num_requests", "p50_s", "p99_s")


def has_seen(report: Report) -> bool:
    """Some of everything."""
    num_faults = sum(count for name, count in report.outcomes.items() if name.startswith("fault, "))
    streams = report.outcomes["stream direct, ended"] > 50 and report.outcomes["stream, cancelled"] > 0
    return streams and num_faults >= 3 and len(report.push_s) >= 3 and len(report.samples) > SECONDS / 3


@pytest.mark.long("bench/soak", "tests/support/subject.py", "tests/support/oracle.py")
@pytest.mark.failure_is_final
async def test_a_short_soak_passes(tmp_path: Path) -> None:
    """With all kinds of traffic, and faults; its results can be read and seen."""
    report = await soak(Load(seconds=SECONDS, num_streams=64), tmp_path, has_seen)
    print(report.summary())
    assert report.faults == []
    assert has_seen(report)
    report.save(tmp_path / "soak.json")
    draw(report, tmp_path / "soak.png")
    assert json.loads((tmp_path / "soak.json").read_text())["faults"] == []
    assert (tmp_path / "soak.png").stat().st_size > 10_000


def test_growth_counts_from_the_middle_on() -> None:
    """What a daemon takes while it warms up is no leak."""
    warming = report_of(*(min(number, 50) * 10**7 for number in range(100)))
    assert (warming.growth_bytes, warming.faults) == (0, [])


@pytest.mark.parametrize(("grown", "is_fault"), [(MAX_GROWTH_BYTES, False), (MAX_GROWTH_BYTES + 100, True)])
def test_growth_above_the_limit_is_a_fault(grown: int, is_fault: bool) -> None:
    """And nothing below it."""
    report = report_of(*[10**9] * 60, *[10**9 + grown] * 40)
    assert report.growth_bytes == grown
    assert bool(report.faults) is is_fault


def test_whatever_is_wrong_is_a_fault() -> None:
    """An answer that may not be, and a finding of the oracle; of the first kind a hundred are kept."""
    report = report_of(1, 1)
    report.findings["digests"] = "not those of a"
    assert report.faults == ["oracle: digests: not those of a"]
    for number in range(1000):
        report.is_wrong(f"stream {number}")
    assert len(report.faults) == 101 and report.outcomes["wrong"] == 1000
    assert "WRONG: stream 7" in report.summary()
