"""Runs tests in forks of this process, which has imported what is slow to import and nothing that may have a bug."""

import ast
import builtins
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis
import pytest

from tools.mutants.loading import PROBE, Sources, probed
from tools.mutants.operators import Mutant

SURVIVED, TIMEOUT, NOT_COVERED = "survived", "timeout", "not covered"
# How much longer than without a bug the tests may take: a loaded machine looks as a bug that hangs.
_SLOWER = 5.0
_START_S = 30.0
# A test that passes in less is not worth ordering by its time.
_FAST_S = 0.05
_END = "\n"
# Below every package that gets bugs.
_OURS = ("genserve", "bench", "clients", "tests", "conftest", "__main__")
_WITHOUT_BUGS = ("genserve.v1", "genserve.tensors", "genserve.errors", "genserve.memory")


@dataclass(frozen=True, slots=True)
class TestRun:
    """One test without a bug. `lines` are (index of the file, line) of each statement that it ran, its own fixtures
    included."""

    __test__ = False

    name: str
    seconds: float
    passed: bool
    lines: frozenset[tuple[int, int]]


@dataclass(slots=True)
class _Fork:
    pid: int
    pipe: int
    ends_s: float
    received: bytearray = field(default_factory=bytearray)


class LineMap:
    """Which tests run which line of `files`. `left_out`: those that fail without a bug or take more than `slowest_s`;
    `modules`: what the tests have imported."""

    def __init__(
        self, files: Sequence[Path], runs: Sequence[TestRun], modules: Sequence[str], slowest_s: float
    ) -> None:
        self.files = files
        self.modules = modules
        self.runs = runs
        self.left_out = [run for run in runs if not run.passed or run.seconds > slowest_s]
        self._tried = [run for run in runs if run.passed and run.seconds <= slowest_s]
        self._by_line: dict[tuple[int, int], list[TestRun]] = {}
        for run in self._tried:
            for line in run.lines:
                self._by_line.setdefault(line, []).append(run)

    @classmethod
    def measure(cls, files: Sequence[Path], tests: Sequence[str], slowest_s: float, timeout_s: float) -> "LineMap":
        """Runs every test once. Raises RuntimeError when that takes longer than `timeout_s`, or pytest cannot start."""
        transforms = {file.resolve(): _prober(index) for index, file in enumerate(files)}
        fork = _start(lambda pipe: _run_probed(transforms, tests, pipe), timeout_s)
        measured = _result(next(_ended([fork]))[1])
        if not isinstance(measured, dict):
            raise RuntimeError(f"the tests gave no result within {timeout_s:.0f} s; run them with pytest to see why")
        runs = [
            TestRun(name, each["seconds"], each["passed"], frozenset((i, line) for i, line in each["lines"]))
            for name, each in measured["tests"].items()
        ]
        return cls(files, runs, measured["modules"], slowest_s)

    def tests_of(self, mutant: Mutant) -> list[TestRun]:
        """Those that run the statement of a bug, the fastest first. For one that runs on import: every test of a file
        in which one uses the module, as it may be about a constant alone."""
        index = self.files.index(mutant.path)
        starts, on_import = statement_starts(mutant.path, mutant.lineno)
        found = {run.name: run for start in starts for run in self._by_line.get((index, start), [])}
        if on_import:
            in_files = {name.partition("::")[0] for name in found}
            found = {run.name: run for run in self._tried if run.name.partition("::")[0] in in_files}
        return sorted(found.values(), key=lambda run: (max(run.seconds, _FAST_S), run.name))


def statement_starts(path: Path, lineno: int) -> tuple[list[int], bool]:
    """The statements that tell whether a line runs, and whether it does on import: the innermost around it; for a
    default those of its function; for what a class or the module says those of all functions."""
    tree = ast.parse(path.read_bytes())
    scope: ast.AST = tree
    innermost: ast.stmt | None = None
    for node in ast.walk(tree):  # breadth first: the last one that fits is the innermost
        if isinstance(node, ast.stmt) and node.lineno <= lineno <= (node.end_lineno or node.lineno):
            innermost = node
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                scope = node
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) and innermost is scope:
        return _starts_in(scope.body), False
    if isinstance(scope, ast.Module):
        return [start for body in _functions(tree) for start in _starts_in(body)], True
    return [innermost.lineno] if innermost is not None else [], False


def _starts_in(body: Sequence[ast.AST]) -> list[int]:
    return [each.lineno for statement in body for each in ast.walk(statement) if isinstance(each, ast.stmt)]


def _functions(tree: ast.Module) -> list[Sequence[ast.AST]]:
    return [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def warm_up(modules: Sequence[str]) -> None:
    """Imports these, except what is ours and may have a bug or import it."""
    for name in modules:
        if name.split(".")[0] not in _OURS or name.startswith(_WITHOUT_BUGS):
            with suppress(Exception):  # a module of another module's making, or one for another system
                importlib.import_module(name)


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Tests that a bug has to pass. `suspect` has failed once, and is alone: where it passes now it is the machine that
    was too slow for it, and `rest` follows."""

    mutant: Mutant
    tests: Sequence[TestRun]
    suspect: str = ""
    rest: Sequence[TestRun] = ()

    def start(self) -> _Fork:
        time_s = _START_S + _SLOWER * sum(run.seconds for run in self.tests)
        return _start(_trial(self.mutant, [run.name for run in self.tests]), time_s)

    def next(self, end: str) -> "_Attempt | None":
        """What has to be tried before anything can be said."""
        names = [run.name for run in self.tests]
        if self.suspect:
            return _Attempt(self.mutant, self.rest) if end == SURVIVED and self.rest else None
        if end not in names:
            return None
        place = names.index(end)
        return _Attempt(self.mutant, [self.tests[place]], end, self.tests[place + 1 :])

    def verdict(self, end: str) -> str:
        return self.suspect if self.suspect and end == TIMEOUT else end


def try_mutants(
    lines: LineMap, mutants: Sequence[Mutant], num_workers: int, budget_s: float
) -> Generator[tuple[Mutant, str]]:
    """Each with what came of it, as it comes: the name of the test that has failed twice, SURVIVED, TIMEOUT, or
    NOT_COVERED. No more are begun after `budget_s` seconds."""
    ends_s = time.monotonic() + budget_s
    waiting = [_Attempt(mutant, lines.tests_of(mutant)) for mutant in reversed(mutants)]
    running: dict[int, tuple[_Attempt, _Fork]] = {}
    try:
        yield from _outcomes(waiting, running, num_workers, ends_s)
    finally:
        for _, fork in running.values():
            _end(fork)


def _outcomes(
    waiting: list[_Attempt], running: dict[int, tuple[_Attempt, _Fork]], num_workers: int, ends_s: float
) -> Iterator[tuple[Mutant, str]]:
    while running or (waiting and (time.monotonic() < ends_s or waiting[-1].suspect)):
        while waiting and len(running) < num_workers:
            attempt = waiting.pop()
            if not attempt.tests:
                yield attempt.mutant, NOT_COVERED
                continue
            fork = attempt.start()
            running[fork.pid] = attempt, fork
        if running:
            fork, text = next(_ended([fork for _, fork in running.values()]))
            attempt, _ = running.pop(fork.pid)
            end = str(_result(text))
            following = attempt.next(end)
            if following is not None:
                waiting.append(following)
            else:
                yield attempt.mutant, attempt.verdict(end)


def _trial(mutant: Mutant, names: Sequence[str]) -> Callable[[int], None]:
    def run(pipe: int) -> None:
        Sources({mutant.path.resolve(): lambda _: ast.parse(mutant.source)}).install()
        observer = _Order(names)
        status = pytest.main([*_options(names), "-x"], plugins=[observer])
        # An error before the first test, such as one on import, is noticed by anybody.
        outcome = SURVIVED if status == pytest.ExitCode.OK else observer.failed or "on import"
        _send(pipe, outcome)

    return run


def _options(names: Sequence[str]) -> list[str]:
    files = list(dict.fromkeys(name.partition("::")[0] for name in names))
    return [
        *files,
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--hypothesis-seed=0",
        "--no-header",
        "--tb=no",
    ]


class _Quiet:
    """No shrinking: that a property fails is all that counts. After tests/conftest.py has loaded its own profile."""

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            "mutants", parent=hypothesis.settings.get_profile("genserve"), phases=phases, database=None
        )
        hypothesis.settings.load_profile("mutants")


class _Order(_Quiet):
    """Runs these tests alone, in this order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._place = {name: place for place, name in enumerate(names)}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._place), key=lambda item: self._place[item.nodeid]
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


class _Observer(_Quiet):
    """Notes which lines each test runs."""

    def __init__(self, hits: set[tuple[int, int]]) -> None:
        self._hits = hits
        self._seconds = 0.0
        self._passed = True
        self.tests: dict[str, dict[str, object]] = {}

    def pytest_runtest_logstart(self) -> None:
        self._hits.clear()
        self._seconds, self._passed = 0.0, True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        self._passed = self._passed and report.outcome == "passed"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests[nodeid] = {"seconds": self._seconds, "passed": self._passed, "lines": sorted(self._hits)}


def _prober(index: int) -> Callable[[bytes], ast.Module]:
    return lambda source: probed(source, index)


def _run_probed(transforms: dict[Path, Callable[[bytes], ast.Module]], tests: Sequence[str], pipe: int) -> None:
    hits: set[tuple[int, int]] = set()
    setattr(builtins, PROBE, hits.add)
    Sources(transforms).install()
    observer = _Observer(hits)
    status = pytest.main(_options(tests), plugins=[observer])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest cannot run {' '.join(tests)}: {status!r}")
    _send(pipe, {"tests": observer.tests, "modules": sorted(sys.modules)})


def _send(pipe: int, result: object) -> None:
    with os.fdopen(pipe, "w") as file:
        file.write(json.dumps(result) + _END)  # processes that a test has left may hold the pipe open


def _start(work: Callable[[int], None], timeout_s: float) -> _Fork:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDWR)
            for standard in range(3):
                os.dup2(nothing, standard)
            work(writing)
        except BaseException:
            _send(writing, {"error": traceback.format_exc()})
        finally:
            os._exit(0)
    os.close(writing)
    return _Fork(pid, reading, time.monotonic() + timeout_s)


def _ended(forks: list[_Fork]) -> Iterator[tuple[_Fork, str | None]]:
    """Each fork when it has ended, with what it has sent; None when its time was up."""
    waiting = {fork.pipe: fork for fork in forks}
    while waiting:
        wait_s = max(min(fork.ends_s for fork in waiting.values()) - time.monotonic(), 0)
        ready, _, _ = select.select(list(waiting), [], [], wait_s)
        for pipe in ready:
            received = os.read(pipe, 1 << 20)
            waiting[pipe].received += received
            if not received or received.endswith(_END.encode()):
                fork = waiting.pop(pipe)
                _end(fork)
                yield fork, fork.received.decode()
        for fork in [each for each in waiting.values() if each.ends_s < time.monotonic()]:
            _end(waiting.pop(fork.pipe))
            yield fork, None


def _result(text: str | None) -> object:
    """What a fork has sent. Raises RuntimeError for an error that is none of a test's."""
    if not text:
        return TIMEOUT if text is None else "the process died"
    result = json.loads(text)
    if isinstance(result, dict) and "error" in result:
        raise RuntimeError(f"a fork failed:\n{result['error']}")
    return result


def _end(fork: _Fork) -> None:
    """With every process that its tests have left."""
    with suppress(ProcessLookupError):
        os.killpg(fork.pid, signal.SIGKILL)
    os.waitpid(fork.pid, 0)
    os.close(fork.pipe)
