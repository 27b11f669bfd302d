"""`genserve doctor` with daemons: what it finds of ours, and what it leaves behind."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from genserve.doctor.trial import tiny_model
from tests.support.warm import process

COMMAND = [sys.executable, "-m", "genserve", "doctor"]
CHECKS = {
    "start", "reach", "transport", "greedy tokens", "weights", "labels", "streams", "pause", "inter-token latency",
    "a misshapen tensor", "a push that ends late", "stop",
}  # fmt: skip


def doctor(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report."""
    done = process.run([*COMMAND, "--json", *arguments], timeout=250)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def levels(report: dict[str, Any], title: str) -> dict[str, str]:
    """Of the checks of a section."""
    section = next(each for each in report["sections"] if each["title"] == title)
    return {verdict["check"]: verdict["level"] for verdict in section["verdicts"]}


@pytest.mark.long("genserve/doctor", "genserve/cli/doctor.py")  # four daemons; the next test has one
def test_a_daemon_is_well_in_every_way_and_each_proves_the_other() -> None:
    """Each version that was pushed is compared with a cold start on it. What is measured may be slow on a machine that
    is busy; all else must be well."""
    status, report = doctor()
    titles = [section["title"] for section in report["sections"]]
    assert titles == ["machine", "--weight-update beside", "--weight-update inplace", "what fits (computed)"]
    for title in titles[1:3]:
        found = levels(report, title)
        assert found.keys() == CHECKS
        measured = {"pause", "inter-token latency", "a push that ends late"}
        assert {check for check, level in found.items() if level != "OK"} <= measured
        assert "FAIL" not in found.values()
    tokens = [v for s in report["sections"][1:3] for v in s["verdicts"] if v["check"] == "greedy tokens"]
    assert [each["finding"] for each in tokens] == ["5 of 5 pushes compared with a cold start: equal"] * 2
    assert [each["started_on"] for each in report["facts"]["daemons"]] == ["a", "b"]
    assert (status, report["ok"]) == (0, True)


@pytest.mark.long("genserve/doctor", "genserve/cli/doctor.py")
def test_a_model_of_the_users_own_is_checked_in_the_way_that_is_asked_for(tmp_path: Path) -> None:
    """Its second version has no cold start; flags go to the daemon, what runs during pushes fits them, and a second
    daemon is not started."""
    own = tiny_model.write(tmp_path / "own", tiny_model.checkpoints(1)["a"])
    flags = [
        "--max-model-len",
        "1024",
        "--kv-cache-memory",
        "128M",
        "--max-active-requests",
        "4",
        "--max-num-seqs",
        "3",
    ]
    status, report = doctor("--model", str(own), "--ways", "beside", "--", *flags)
    found = levels(report, "--weight-update beside")
    assert {found[each] for each in ("greedy tokens", "weights", "a misshapen tensor", "streams", "labels")} == {"OK"}
    assert levels(report, "what fits (computed)")["your model"] == "OK"
    assert [each["model"] for each in report["facts"]["daemons"]] == [str(own)]
    assert status == 0


def _is_core(each: psutil.Process) -> bool:
    """Not if it has ended meanwhile, as those do that look at the machine."""
    try:
        return "EngineCore" in each.name()
    except psutil.NoSuchProcess:
        return False


def test_an_interrupt_leaves_no_process_behind() -> None:
    """Not of the daemon that is starting either, which is in a group of its own; exit 130, without a traceback."""
    program = (  # as a shell starts it in the background, it would ignore SIGINT
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from genserve.cli import main; sys.exit(main())"
    )
    with process.WarmPopen(
        [sys.executable, "-c", program, "doctor", "--ways", "beside"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as doctor:
        assert doctor.stderr is not None
        while b"serving a with" not in (line := doctor.stderr.readline()):
            assert line, f"it has ended with {doctor.wait()}"
        started: list[psutil.Process] = []
        while not any(_is_core(each) for each in started):
            time.sleep(0.05)
            started = psutil.Process(doctor.pid).children(recursive=True)
        doctor.send_signal(signal.SIGINT)
        _, errors = doctor.communicate(timeout=120)
    assert doctor.returncode == 130
    assert b"Traceback" not in errors
    gone, alive = psutil.wait_procs(started, timeout=60)
    assert (len(gone), alive) == (len(started), [])
