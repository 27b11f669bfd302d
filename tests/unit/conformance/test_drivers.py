"""Drivers: what those of this repository use, and what becomes of one that does not do as it should."""

import ast
import asyncio
import fcntl
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from clients.conformance.runner import drivers
from clients.conformance.runner.drivers import CLIENTS, DRIVERS, results_of
from tests.support.patience import until

Started = Callable[[], set[psutil.Process]]
STUBS = [
    CLIENTS / "conformance/drivers" / name for name in ("python_stubs.py", "checkpoint.py", "transfers.py", "crc32c.py")
]


@pytest.mark.parametrize("path", STUBS, ids=lambda path: str(path.name))
def test_the_driver_on_stubs_uses_nothing_else_of_genserve(path: Path) -> None:
    imported = {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    own = {name for name in imported if name.startswith(("genserve", "clients", "tests"))}
    assert own <= {"genserve.v1", *(f"clients.conformance.drivers.{path.stem}" for path in STUBS)}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRIVERS)
async def test_a_driver_says_which_step_it_does_not_have(name: str) -> None:
    """And goes on with the next one: a scenario of a later release has steps that it does not know."""
    if name == "typescript" and not (CLIENTS / "typescript/node_modules").is_dir():
        pytest.skip("run scripts/typescript: it installs the packages of this driver")
    missing = {"error": {"reason": "NOT_IMPLEMENTED"}}
    steps = [{"do": "dance", "partner": "b"}, {"do": "sing"}]
    assert await results_of(DRIVERS[name], {"address": "127.0.0.1:9", "steps": steps}) == [missing, missing]


@pytest.fixture
def started() -> Started:
    """Processes that the test has started, and that still run. Engines of other tests may run beside them."""
    before = set(psutil.Process().children())
    return lambda: set(psutil.Process().children()) - before


def program(text: str) -> tuple[str, ...]:
    """A driver."""
    return sys.executable, "-c", text


async def test_each_line_is_a_result() -> None:
    echo = "import json, sys; print(len(json.load(sys.stdin))); print(2)"
    assert await results_of(program(echo), {"a": 1, "b": 2}) == [2, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [("print('x')", "JSON"), ("import sys; sys.exit('broken')", "1: broken"), ("1 / 0", "ZeroDivision")],
)
async def test_a_driver_that_fails_is_a_difference(text: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        await results_of(program(text), {})


@pytest.mark.parametrize(("name", "said"), [("nonesuch", "No such file"), (str(CLIENTS), "Permission denied")])
async def test_a_driver_that_does_not_start_is_a_difference(name: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        await results_of((name,), {})


async def test_a_driver_that_prints_without_end_is_ended(started: Started) -> None:
    """Long before its output fills the memory."""
    with pytest.raises(RuntimeError, match="16 MiB"):
        await results_of(program("while True: print('x' * (1 << 20))"), {})
    assert started() == set()


async def test_output_may_be_nested_too_deeply() -> None:
    with pytest.raises(RuntimeError, match="JSON"):
        await results_of(program("print('[' * 100_000)"), {})


LOCKING = 'exec 9>"$0"; flock 9; sleep 1000 & '
"""Of a shell: starts a process that has its streams, and locks a file as long as it runs."""


def wait_until_free(path: Path) -> None:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


async def test_what_a_driver_leaves_behind_is_ended(tmp_path: Path) -> None:
    """At once: the runner need not wait for it."""
    path = tmp_path / "lock"
    assert await results_of(("sh", "-c", LOCKING + "echo 1", str(path)), {}) == [1]
    wait_until_free(path)


async def test_a_command_that_starts_a_driver_which_hangs_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "lock"
    path.touch()  # the shell may not have come so far
    monkeypatch.setattr(drivers, "TIMEOUT_S", 0.5)
    with pytest.raises(RuntimeError, match="more than"):
        await results_of(("sh", "-c", LOCKING + "wait", str(path)), {})
    wait_until_free(path)


async def test_a_driver_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    monkeypatch.setattr(drivers, "TIMEOUT_S", 0.5)
    with pytest.raises(RuntimeError, match="more than"):
        await results_of(program("import time; time.sleep(1000)"), {})
    assert started() == set()


async def test_no_driver_outlives_an_interrupted_runner(started: Started) -> None:
    running = asyncio.create_task(results_of(program("import time; time.sleep(1000)"), {}))
    await until(started)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert started() == set()
