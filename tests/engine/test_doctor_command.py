"""`genserve doctor` as a process, without a daemon that serves: what it prints, refuses, returns and leaves behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from genserve.doctor.trial import tiny_model
from tests.support.warm import process

pytestmark = pytest.mark.long(
    "genserve/doctor", "genserve/cli/doctor.py", "genserve/launcher", "genserve/process/signals.py"
)


def doctor(*arguments: str, cold: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end; `cold` as a user does, whose programs have to import what they need."""
    command = [sys.executable, "-m", "genserve", "doctor", *arguments]
    if cold:
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    return process.run(command, timeout=100)


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


def test_a_daemon_that_does_not_start_fails_with_its_last_words(tmp_path: Path) -> None:
    """And nothing is compared with it; the other checks are there."""
    own = tiny_model.write(tmp_path / "own", tiny_model.checkpoints(1)["a"])
    done = doctor("--model", str(own), "--ways", "beside", "--json", "--", "--drain-timeout", "-1")
    titles = {section["title"]: section["verdicts"] for section in json.loads(done.stdout)["sections"]}
    assert list(titles) == ["machine", "--weight-update beside", "what fits (computed)"]
    (start,) = titles["--weight-update beside"]
    assert (done.returncode, start["check"], start["level"]) == (1, "start", "FAIL")
    assert "ended with status 2: " in start["finding"]
    assert "argument --drain-timeout: '-1' is not a time" in start["finding"]


def test_a_daemon_that_is_late_fails_and_is_ended(tmp_path: Path) -> None:
    """Nothing waits for longer than the limit of a step."""
    own = tiny_model.write(tmp_path / "own", tiny_model.checkpoints(1)["a"])
    done = doctor("--model", str(own), "--ways", "beside", "--timeout", "100ms", "--json", cold=True)
    titles = {section["title"]: section["verdicts"] for section in json.loads(done.stdout)["sections"]}
    (start,) = titles["--weight-update beside"]
    assert start["finding"].startswith("the daemon did not serve within 0.1 s (--timeout)")
    checks = {verdict["check"]: verdict["finding"] for verdict in titles["machine"]}
    assert "within 0.1 s" in checks["driver"]
    assert done.returncode == 1
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(own) in " ".join(each.info["cmdline"] or [])]


def test_a_model_that_does_not_fit_is_not_served(tmp_path: Path) -> None:
    """A machine that runs out of memory is no place to look at."""
    own = tiny_model.write(tmp_path / "own", tiny_model.checkpoints(1)["a"])
    done = doctor("--model", str(own), "--json", "--", "--kv-cache-memory-bytes", "900T")
    titles = {section["title"]: section["verdicts"] for section in json.loads(done.stdout)["sections"]}
    for way in ("beside", "inplace"):
        (start,) = titles[f"--weight-update {way}"]
        assert (start["level"], start["finding"]) == ("WARN", "not tried: there is no room for your model")
    assert [each["level"] for each in titles["what fits (computed)"] if each["check"] == "your model"] == ["FAIL"]
    assert done.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_it_and_what_it_has_started(number: signal.Signals) -> None:
    """As Ctrl-C does; without a traceback."""
    program = (  # as nohup starts it, it would ignore SIGHUP
        f"import signal, sys; signal.signal({number:d}, signal.SIG_DFL); "
        "from genserve.cli import main; sys.exit(main())"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, "doctor", "--machine-only",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ),
    )  # fmt: skip
    async with asyncio.timeout(60):
        while not (children := psutil.Process(process.pid).children(recursive=True)):
            await asyncio.sleep(0.02)
        process.send_signal(number)
        _, errors = await process.communicate()
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert psutil.wait_procs(children, timeout=30)[1] == []
