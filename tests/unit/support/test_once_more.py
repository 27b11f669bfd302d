"""The second try of failed tests, in runs of pytest of their own."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support import flaky_record
from tests.support.flaky_record import Row, faults

ROOT = Path(__file__).parents[3]
RECORD = ROOT / "tests" / "flaky.tsv"
# Each starts pytest once or twice: half a minute of CPU time, for what changes once a month.
of_second_tries = pytest.mark.long(
    *("tests/support/once_more.py", "tests/support/failure_evidence.py", "tests/support/flaky_record.py"),
    *("tests/support/time_limits.py", "tests/conftest.py", "requirements.lock"),
)

CONFTEST = """
from pathlib import Path
import pytest
from tests.support import failure_evidence, once_more, time_limits

def pytest_addoption(parser):
    parser.addoption("--once-more", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "failure_is_final: random")
    config.pluginmanager.register(failure_evidence.FailureEvidence())
    config.pluginmanager.register(time_limits)
    config.pluginmanager.register(once_more)
    if config.option.once_more and not hasattr(config, "workerinput"):
        config.pluginmanager.register(once_more.OnceMore(config, Path("flaky.tsv").absolute()))
"""
FIRST_TIME = """
import time
from pathlib import Path
import pytest

def is_first(name):
    path = Path(name).absolute()
    found = path.exists()
    path.touch()
    return not found

"""
FLAKY = FIRST_TIME + "def test_flaky():\n    assert not is_first('one'), 'too late'\n"
# A call that keeps the global interpreter lock stops every thread, as a machine does that runs something else.
STOOD_STILL = FIRST_TIME + (
    "import ctypes\n\n"
    "def test_flaky():\n"
    "    if is_first('one'):\n"
    "        ctypes.PyDLL(None).usleep(900_000)\n"
    "        assert 0, 'too late'\n"
)
REAL = "def test_real():\n    assert 1 == 2\n"
# What an earlier test does to an engine that both use: alone, the second one would pass.
SPOILED = "engine = []\n\ndef test_spoils():\n    engine.append(1)\n\ndef test_is_spoiled():\n    assert not engine\n"


def run(directory: Path, *options: str, **files: str) -> "subprocess.CompletedProcess[str]":
    """pytest over these files."""
    (directory / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", f"--rootdir={directory}"]
    return subprocess.run(
        [*command, "-c", "pytest.ini", "--once-more", *options],
        cwd=directory,
        env={**os.environ, "GENSERVE_TEST_PATIENCE": "0.1"},  # an alarm that is not heard strikes again soon
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(autouse=True)
def settings(tmp_path: Path) -> None:
    """The second try finds them by itself, as that of the project does."""
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath={ROOT}\n")


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_flaky_test_passes_alone_and_is_recorded(tmp_path: Path, workers: str) -> None:
    """The run passes, and prints the first failure in full."""
    done = run(tmp_path, "-n", workers, test_flaky=FLAKY)
    assert done.returncode == 0, done.stdout
    assert "FLAKY, SUSPECT" in done.stdout, done.stdout
    assert "assert not is_first('one'), 'too late'" in done.stdout
    (row,) = flaky_record.read(tmp_path / "flaky.tsv")
    assert (row.test, row.fixed) == ("test_flaky.py::test_flaky", "") and "too late" in row.said


LEAVES = "def test_leaves():\n    pass\n"


@pytest.mark.slow
def test_a_flaky_test_that_nobody_has_mended_fails(tmp_path: Path) -> None:
    """The record has it with other parameters. What its process ran before it is printed."""
    listed = Row(datetime.now(UTC).date(), "0123abcd", "test_flaky.py::test_flaky[1]", "too late", 0.0)
    flaky_record.append(tmp_path / "flaky.tsv", listed)
    done = run(tmp_path, "-n1", "--dist=loadfile", test_a=LEAVES, test_flaky=FLAKY)
    assert done.returncode == 1, done.stdout
    assert "before it in its process: test_a.py" in done.stdout
    assert "FAILED  test_flaky.py::test_flaky is listed twice, and was not fixed in between" in done.stdout


@of_second_tries
def test_a_process_that_stood_still_explains_a_flaky_test(tmp_path: Path) -> None:
    """The clock runs in a thread: it stands still when the whole process does."""
    done = run(tmp_path, "-n0", test_flaky=STOOD_STILL)
    assert done.returncode == 0, done.stdout
    assert "\nFLAKY  test_flaky.py::test_flaky" in done.stdout
    assert flaky_record.read(tmp_path / "flaky.tsv")[0].standstill_s >= 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("text", "name"), [(REAL, "test_real"), (SPOILED, "test_is_spoiled")])
def test_a_real_failure_and_a_spoiled_engine_fail_again(tmp_path: Path, text: str, name: str) -> None:
    """The tests of the file that ran before run again before it."""
    done = run(tmp_path, "-n2", "--dist=loadfile", test_it=text)
    assert done.returncode == 1
    assert f"FAILED AGAIN  test_it.py::{name}" in done.stdout
    assert not (tmp_path / "flaky.tsv").exists()


OTHERS = {
    "marked": (FLAKY.replace("def test", "@pytest.mark.failure_is_final\ndef test"), "what it found counts"),
    "finding": (
        FIRST_TIME
        + "class Wrong(AssertionError):\n    is_final = True\n\n"
        + "def test_flaky():\n    if is_first('one'): raise Wrong\n",
        "what it found counts",
    ),
    "hypothesis": (
        FIRST_TIME
        + "from hypothesis import given, settings, strategies as st\n\n"
        + "@settings(max_examples=1, database=None)\n@given(st.just(1))\n"
        + "def test_flaky(one):\n    assert not is_first('one')\n    assert not is_first('two')\n",
        "what it found counts",
    ),
    "crash": (FIRST_TIME + "def test_flaky():\n    if is_first('one'): __import__('os').abort()\n", "crashed"),
    "hang": (
        FIRST_TIME + "@pytest.mark.timeout(1)\ndef test_flaky():\n    if is_first('one'): time.sleep(60)\n",
        "it hung",
    ),
    "hang that a task swallows": (
        FIRST_TIME
        + "import asyncio\n\nasync def spin():\n    while True: pass\n\n"
        + "async def wait():\n    task = asyncio.create_task(spin())\n    await asyncio.Event().wait()\n\n"
        + "@pytest.mark.timeout(1)\ndef test_flaky():\n    if is_first('one'): asyncio.run(wait())\n",
        "it hung",
    ),
    "hang after a failure": (
        FIRST_TIME
        + "@pytest.fixture\ndef hanging():\n    yield\n    if is_first('two'): time.sleep(600)\n\n"
        + "@pytest.mark.timeout(1)\ndef test_flaky(hanging):\n    assert not is_first('one')\n",
        "it hung",
    ),
    "teardown": (
        FIRST_TIME
        + "@pytest.fixture\ndef leaving():\n    yield\n    assert not is_first('one')\n\n"
        + "def test_flaky(leaving):\n    pass\n",
        "left something behind",
    ),
}


@of_second_tries
@pytest.mark.parametrize("kind", OTHERS)
def test_a_final_failure_gets_no_second_try(tmp_path: Path, kind: str) -> None:
    """Each of them would pass."""
    text, reason = OTHERS[kind]
    done = run(tmp_path, "-n2", "--max-worker-restart=1", test_flaky=text)
    assert done.returncode == 1, done.stdout
    assert "FINAL  test_flaky.py::test_flaky" in done.stdout and reason in done.stdout
    assert "FLAKY" not in done.stdout


@of_second_tries
def test_a_finding_in_a_group_of_exceptions_is_final(tmp_path: Path) -> None:
    """A TaskGroup raises one."""
    raises = "raise ExceptionGroup('of tasks', [ValueError(), Wrong()])"
    done = run(tmp_path, "-n0", test_flaky=OTHERS["finding"][0].replace("raise Wrong", raises))
    assert done.returncode == 1 and "FINAL  test_flaky.py::test_flaky" in done.stdout


@of_second_tries
def test_a_second_try_that_is_skipped_excuses_nothing(tmp_path: Path) -> None:
    """pytest calls that a success."""
    text = FIRST_TIME + "def test_it():\n    if is_first('one'): assert 0\n    pytest.skip('no memory')\n"
    done = run(tmp_path, "-n0", test_it=text)
    assert done.returncode == 1 and "FAILED AGAIN  test_it.py::test_it" in done.stdout
    assert not (tmp_path / "flaky.tsv").exists()


@of_second_tries
def test_a_run_that_its_first_failure_stopped_stays_red(tmp_path: Path) -> None:
    """The tests after it did not run."""
    done = run(tmp_path, "-n0", "-x", test_it=FLAKY + "\n\n" + REAL)
    assert done.returncode == 1 and "others did not run" in done.stdout and "FLAKY" not in done.stdout


@of_second_tries
def test_more_than_three_failures_are_not_tried_again(tmp_path: Path) -> None:
    """They have one cause."""
    text = FIRST_TIME + "@pytest.mark.parametrize('n', range(4))\ndef test_one(n):\n    assert not is_first(str(n))\n"
    done = run(tmp_path, "-n2", test_it=text)
    assert done.returncode == 1 and "4 failures, more than 3" in done.stdout


SHARED = FIRST_TIME + (
    "@pytest.fixture(scope='module')\ndef engine():\n    assert not is_first('one'), 'too late'\n\n"
    "@pytest.mark.parametrize('n', range(5))\ndef test_uses(engine, n):\n    assert n != {bad}\n"
)


@of_second_tries
@pytest.mark.parametrize(("bad", "status"), [(9, 0), (4, 1)])
def test_a_fixture_that_fails_is_one_failure(tmp_path: Path, bad: int, status: int) -> None:
    """However many tests use it; all of them have to pass then."""
    done = run(tmp_path, "-n2", "--dist=loadfile", test_it=SHARED.format(bad=bad))
    assert done.returncode == status, done.stdout
    said = "FAILED AGAIN" if status else "FLAKY, SUSPECT (no standstill explains it)"
    assert f"{said}  test_it.py::test_uses[0] and 4 more of its fixture" in done.stdout


@of_second_tries
def test_a_fixture_of_each_test_that_fails_is_a_failure_for_each(tmp_path: Path) -> None:
    """Although all say the same: a daemon may be deaf for a minute."""
    text = SHARED.format(bad=9).replace("scope='module'", "").replace("is_first('one')", "is_first(request.node.name)")
    done = run(tmp_path, "-n2", "--dist=loadfile", test_it=text.replace("def engine()", "def engine(request)"))
    assert done.returncode == 1
    assert "5 failures, more than 3: none is tried once more" in done.stdout


@of_second_tries
def test_a_file_that_cannot_be_collected_fails_the_run(tmp_path: Path) -> None:
    """Nothing is tried again."""
    done = run(tmp_path, "-n2", test_flaky=FLAKY, test_broken="import nothing_of_this_name\n")
    assert done.returncode not in (0, 5) and "FLAKY" not in done.stdout


@of_second_tries
@pytest.mark.parametrize(
    ("ends", "also_says"), [("assert 0", "this process did not run for"), ("os.abort()", "crashed while running")]
)
def test_a_failure_has_the_log_that_was_written_meanwhile(tmp_path: Path, ends: str, also_says: str) -> None:
    """And how the machine was, unless the process of the test has died."""
    text = f"import os\n\ndef test_it(tmp_path):\n    (tmp_path / 'stderr').write_text('the daemon: why')\n    {ends}\n"
    done = run(tmp_path, "-n2", test_it=text)
    assert "the daemon: why" in done.stdout and also_says in done.stdout


# Directories and logs come and go while those of a failure are looked for.
RESTLESS = """
import os, threading, time
from contextlib import suppress
import pytest

def change(directory):
    while True:
        with suppress(OSError):
            directory.mkdir()
            (directory / "stderr").touch()
            os.unlink(directory / "stderr")
            directory.rmdir()

@pytest.mark.parametrize("number", range(8))
def test_it(tmp_path, number):
    for each in "ab":
        threading.Thread(target=change, args=(tmp_path / each,), daemon=True).start()
    time.sleep(0.1)
    assert 0
"""


@of_second_tries
def test_what_vanishes_while_logs_are_looked_for_ends_no_run(tmp_path: Path) -> None:
    """An error in a hook of pytest would."""
    done = run(tmp_path, "-n0", test_it=RESTLESS)
    assert "8 failed" in done.stdout and "INTERNALERROR" not in done.stdout


def row(test: str, day: int, fixed: str = "") -> Row:
    """A row of a day."""
    when = flaky_record.date(2026, 11, day)
    return Row(when, "0123abcd", test, "assert False", 0.0, fixed)


def test_a_test_may_not_be_listed_twice_before_it_is_fixed() -> None:
    """And at most ten tests are not fixed."""
    assert faults([row("a", 1), row("b", 2), row("a", 15)]) == []
    assert faults([row("a", 1, fixed="1234abcd"), row("a", 3)]) == []
    assert faults([row("a[1]", 1), row("a[2]", 1)]) == []  # in one run
    assert faults([row("a", 1), row("a", 14)]) == ["a is listed twice, and was not fixed in between"]
    assert faults([row("a[1]", 1), row("a[2]", 14)]) == ["a is listed twice, and was not fixed in between"]
    assert faults([row(str(number), 1) for number in range(11)]) == ["11 tests are flaky and not fixed, more than 10"]


def test_the_projects_record_is_in_order() -> None:
    """tests/flaky.tsv."""
    assert faults(flaky_record.read(RECORD)) == []


def test_a_row_is_one_line(tmp_path: Path) -> None:
    """Whatever the failure said."""
    path = tmp_path / "flaky.tsv"
    written = Row(flaky_record.date(2026, 11, 1), "0123abcd", "t[a\tb]", "two\nlines", 1.25)
    flaky_record.append(path, written)
    flaky_record.append(path, written)
    assert [each.said for each in flaky_record.read(path)] == ["two lines", "two lines"]
