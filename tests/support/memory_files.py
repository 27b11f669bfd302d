"""Anonymous memory of genserve that this process has open: what is called genserve-, arenas above all."""

import gc
import os
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.patience import wait_until


def open_files(prefix: str = "genserve-") -> dict[int, str]:
    """The names of the memory that this process has open, by inode: a map of it has a descriptor of its own. Some may
    be about to be freed."""
    found = (_memory_file(each) for each in Path("/proc/self/fd").iterdir())
    return {inode: name for inode, name in found if name.startswith(prefix)}


class GivenBack:
    """A plugin that fails the last test if memory of any is still open when all tests of this process have ended, with
    their fixtures and event loops. Memory that tests leave adds up, and a daemon may leave it in the same way."""

    def __init__(self) -> None:
        self._openers: dict[int, str] = {}
        self._running: pytest.Item | None = None
        self._has_failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Notes that the test has failed, or was expected to: the traceback keeps what its frames hold."""
        report = yield
        self._has_failed |= report.failed or hasattr(report, "wasxfail")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Notes what a test has opened and not closed, and looks again after the last test."""
        if item is self._running:  # once more, by another plugin
            return (yield)
        self._running, self._has_failed, before = item, False, open_files()
        result = yield
        self._running = None
        if not self._has_failed:
            self._openers.update(dict.fromkeys(open_files().keys() - before.keys(), item.nodeid))
        if nextitem is None and (left := self._left()):
            # xdist takes a report of the running test alone.
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", "\n".join(left), "teardown")
            item.ihook.pytest_runtest_logreport(report=report)
        return result

    def _left(self) -> list[str]:
        """Who has left what open."""
        with suppress(AssertionError):
            wait_until(self._are_closed)
        left = [(self._openers[inode], name) for inode, name in open_files().items() if inode in self._openers]
        return [f"{opener} has left open: {name}" for opener, name in sorted(left)]

    def _are_closed(self) -> bool:
        """Garbage may hold some, and a thread may be about to close others."""
        gc.collect()
        return not open_files().keys() & self._openers.keys()


def _memory_file(descriptor: Path) -> tuple[int, str]:
    try:
        name = os.readlink(descriptor)
        if not name.startswith("/memfd:"):
            return 0, ""
        return os.stat(descriptor).st_ino, name.removeprefix("/memfd:").removesuffix(" (deleted)")
    except FileNotFoundError:  # the directory's own, or one that was closed meanwhile
        return 0, ""
