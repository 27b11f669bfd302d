"""`genserve doctor` as a process, without a daemon: what it prints, refuses and returns."""

import json
import subprocess
import sys

import pytest


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    command = [sys.executable, "-m", "genserve", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_machine_is_checked_with_a_line_for_each_check_and_a_summary() -> None:
    """Progress goes to stderr; the exit status says whether something fails."""
    done = doctor("--machine-only")
    lines = done.stdout.splitlines()
    assert lines[0] == "machine"
    assert "what fits (computed)" in lines
    assert all(
        line.startswith(("  OK ", "  INFO ", "  WARN ", "  FAIL ", "   ")) for line in lines[1:-1] if line[0] == " "
    )
    assert done.returncode == (1 if any(line.startswith("  FAIL") for line in lines) else 0)
    assert " OK, " in lines[-1]
    assert done.stderr == "genserve: looking at the machine\n"


def test_json_is_a_document_with_facts_and_what_the_flags_made_of_the_room() -> None:
    """Flags after -- are heeded."""
    done = doctor("--machine-only", "--json", "--", "--tensor_parallel_size", "2", "--enable-lora")
    document = json.loads(done.stdout)
    assert done.returncode == (0 if document["ok"] else 1)
    assert [section["title"] for section in document["sections"]] == ["machine", "what fits (computed)"]
    assert document["facts"]["serve_flags"] == ["--tensor_parallel_size", "2", "--enable-lora"]
    assert document["facts"]["machine"]["host"]["packages"]["torch"]
    memory = document["sections"][0]["verdicts"][0]
    assert (memory["check"], memory["figures"]["num_ranks"]) == ("host memory", 2)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model", "/nowhere"], 1, "genserve: INVALID_FIELD: model: "),
        (["--ways", "fast"], 1, "genserve: INVALID_FIELD: ways: 'fast' is not one of "),
        (["--", "x"], 1, "genserve: INVALID_FIELD: SERVE_FLAGS: must begin with a flag"),
        (["--", "--model=x"], 1, "genserve: INVALID_FIELD: SERVE_FLAGS: --model is the doctor's to set"),
        (["--timeout-s", "0"], 2, "'0' is not a time above 0"),
        (["--timeout-s", "9" * 30], 2, "is not a time above 0 and of at most 24h"),
    ],
)
def test_wrong_input_ends_at_once_in_one_line(arguments: list[str], status: int, words: str) -> None:
    """Nothing is started."""
    done = doctor(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert words in done.stderr.splitlines()[-1]
    assert "looking at" not in done.stderr
