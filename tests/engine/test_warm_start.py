"""A process that is forked with everything imported is as one that was started."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from genserve.launcher.end_with_starter import ending_with_this_process
from tests.support.warm.process import WarmPopen

pytestmark = pytest.mark.long(
    "tests/support/warm", "tests/support/vllm_plugin", "genserve/launcher/end_with_starter.py"
)

ROOT = Path(__file__).parents[2]


COMMAND = [sys.executable, "-m", "tests.support.warm.probe", "first", "and second"]


def probe(log: Path, environment: dict[str, str], command: Sequence[str] = COMMAND) -> subprocess.Popen[str]:
    """Starts the probe in a group of its own."""
    with log.open("w") as stderr:
        return WarmPopen(
            command,
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
        assert each["naps"]
        assert (each["cpus"], each["end_signal"]) == (sorted(os.sched_getaffinity(0)), 0)
    assert own["arguments"] == ["first", "and second"]
    process.communicate(timeout=60)
    assert process.returncode == 7
    assert (tmp_path / "stderr").read_text() == "on stderr\n"


def test_an_engine_that_starts_cold_waits_as_lightly(tmp_path: Path) -> None:
    """The interpreter is a new one."""
    done = subprocess.run(COMMAND, cwd=ROOT, input="", capture_output=True, text=True, timeout=120, check=False)
    said = json.loads(done.stdout)
    assert said["own"]["naps"] and said["child"]["naps"]


def test_a_warm_process_can_end_with_its_starter(tmp_path: Path) -> None:
    """As one does that is started through launcher.end_with_starter; it has the CPUs of the thread that starts it."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        process = probe(tmp_path / "stderr", {}, ending_with_this_process(COMMAND))
    finally:
        os.sched_setaffinity(0, cpus)
    own = json.loads(process.communicate(timeout=60)[0])["own"]
    assert own["imported"]
    assert (own["pid"], own["parent"], own["cpus"]) == (process.pid, os.getpid(), [min(cpus)])
    assert (own["arguments"], own["end_signal"]) == (["first", "and second"], signal.SIGTERM)


def test_a_warm_process_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """The server of its own, which it has for the processes that it starts, ends too, though nobody has killed it."""
    process = probe(tmp_path / "stderr", {})
    assert process.stdout is not None
    process.stdout.readline()
    started = psutil.Process(process.pid).children(recursive=True)
    assert started
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []


def test_program_that_reads_other_variables_at_import_starts_cold(tmp_path: Path) -> None:
    """The modules of a forked process have been imported already."""
    process = probe(tmp_path / "stderr", {"VLLM_LOGGING_LEVEL": "ERROR"})
    said = json.loads(process.communicate(timeout=120)[0])
    assert not said["own"]["imported"]
