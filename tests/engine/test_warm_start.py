"""A process that is forked with everything imported is as one that was started."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.warm.process import WarmPopen

ROOT = Path(__file__).parents[2]


def probe(log: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Starts the probe in a group of its own."""
    with log.open("w") as stderr:
        return WarmPopen(
            [sys.executable, "-m", "tests.support.warm.probe", "first", "and second"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **environment},
            cwd=ROOT,
            text=True,
            process_group=0,
        )


def test_a_warm_process_has_what_a_started_one_has(tmp_path: Path) -> None:
    """Parent, group, directory, arguments, environment, streams and status; so has a process that it starts itself."""
    process = probe(tmp_path / "stderr", {"GENSERVE_PROBE": "1 = one"})
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    own, child = said["own"], said["child"]
    assert own["imported"] and child["imported"]
    assert (own["pid"], own["parent"], own["group"]) == (process.pid, os.getpid(), process.pid)
    assert (child["parent"], child["group"], said["child_status"]) == (process.pid, process.pid, 0)
    for each in (own, child):
        assert (each["directory"], each["variable"], each["threads"]) == (str(ROOT), "1 = one", 1)
    assert own["arguments"] == ["first", "and second"]
    process.communicate(timeout=10)
    assert process.returncode == 7
    assert (tmp_path / "stderr").read_text() == "on stderr\n"


def test_a_warm_process_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """The server of its own, which it has for the processes that it starts, ends too, though nobody has killed it."""
    process = probe(tmp_path / "stderr", {})
    assert process.stdout is not None
    process.stdout.readline()
    started = psutil.Process(process.pid).children(recursive=True)
    assert started
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []


def test_a_program_that_is_to_read_other_variables_when_it_is_imported_starts_cold(tmp_path: Path) -> None:
    """The modules of a forked process have been imported already."""
    process = probe(tmp_path / "stderr", {"VLLM_LOGGING_LEVEL": "ERROR"})
    said = json.loads(process.communicate(timeout=30)[0])
    assert not said["own"]["imported"]
