"""Memory without a name that this process has open: arenas, tables of ids, and numbers of bytes that have arrived."""

import gc
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.patience import STEP_S


def open_files(prefix: str = "genserve-") -> dict[int, str]:
    """Their names by inode: each map of one has a descriptor too. Some may be about to be freed."""
    found = (_memory_file(each) for each in Path("/proc/self/fd").iterdir())
    return {inode: name for inode, name in found if name.startswith(prefix)}


class GivenBack:
    """A plugin that fails the last test of a file whose tests have left such memory open: it adds up over a thousand
    files, and what a test leaves a daemon may leave as well."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._before: dict[int, str] = {}
        self._has_failure = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """The traceback of a failure holds what its frames hold."""
        report = yield
        self._has_failure |= report.failed
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Looks when a file begins, and when nothing refers to what its last test had."""
        if item.path != self._path:
            self._path, self._before, self._has_failure = item.path, open_files(), False
        result = yield
        if not self._has_failure and (nextitem is None or nextitem.path != item.path) and (left := self._left()):
            what = f"the tests of {item.path.name} leave open: {', '.join(left)}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", what, "teardown")
            item.ihook.pytest_runtest_logreport(report=report)
        return result

    def _left(self) -> list[str]:
        """What is still open when threads have ended and garbage is collected."""
        by_s = time.monotonic() + STEP_S
        while (left := open_files()).keys() - self._before.keys() and time.monotonic() < by_s:
            gc.collect()
            time.sleep(0.01)
        return sorted(name for inode, name in left.items() if inode not in self._before)


def _memory_file(descriptor: Path) -> tuple[int, str]:
    try:
        name = os.readlink(descriptor)
        if not name.startswith("/memfd:"):
            return 0, ""
        return os.stat(descriptor).st_ino, name.removeprefix("/memfd:").removesuffix(" (deleted)")
    except FileNotFoundError:  # the directory's own, or one that was closed meanwhile
        return 0, ""
