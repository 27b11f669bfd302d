"""The report can be read, and pasted."""

import json

from genserve.doctor.verdict import (
    Level,
    Section,
    Verdict,
    exit_status,
    fail,
    info,
    ok,
    section_lines,
    summary_line,
    to_json,
    warn,
)

WELL = Section("machine", (ok("memory", "much", size_bytes=7), info("8B", "fits")))
ILL = Section("daemon", (warn("pause", "long", "Wait."), fail("tokens", "wrong " * 40, "Report it.")))


def test_only_a_check_that_fails_makes_the_exit_status_1() -> None:
    """A warning is for people."""
    assert exit_status([WELL]) == 0
    assert exit_status([Section("d", ILL.verdicts[:1])]) == 0
    assert exit_status([WELL, ILL]) == 1


def test_lines_have_the_verdict_the_check_what_was_seen_and_what_to_do() -> None:
    """Wrapped below each other; OK needs no advice."""
    lines = section_lines(ILL)
    assert lines[0] == "daemon"
    assert lines[1].split() == ["WARN", "pause", "long"]
    assert lines[2].strip() == "-> Wait."
    assert lines[3].split()[:3] == ["FAIL", "tokens", "wrong"]
    assert len(lines) > 6
    assert all(len(line) <= 116 for line in lines)
    assert "->" not in "\n".join(section_lines(WELL))


def test_the_summary_counts_each_verdict() -> None:
    """Information is none."""
    assert summary_line([WELL, ILL], 61.4) == "1 OK, 1 WARN, 1 FAIL in 61 s"


def test_json_has_everything() -> None:
    """Verdicts with their figures, and the facts."""
    document = json.loads(to_json([WELL, ILL], {"machine": {"cpu": "x"}}, 61.44))
    assert (document["ok"], document["elapsed_s"]) == (False, 61.4)
    assert document["facts"] == {"machine": {"cpu": "x"}}
    first = document["sections"][0]["verdicts"][0]
    assert first == {"check": "memory", "level": "OK", "finding": "much", "advice": "", "figures": {"size_bytes": 7}}


def test_a_verdict_without_a_finding_still_has_a_line() -> None:
    """Its name says what was checked."""
    assert section_lines(Section("s", (Verdict("c", Level.OK, ""),)))[1].split() == ["OK", "c"]
