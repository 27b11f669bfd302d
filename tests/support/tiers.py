"""Which tests run: those of every day, or with `--all` those marked `long` too.

`@pytest.mark.long("genserve/fleet", ...)` names the folders and files that the test is about. A long test also runs
where it is chosen, by its file, its name or -k, and with `--touched-since COMMIT` where something of those, or its own
file, has changed since: so CI runs the long tests of what a change is about.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_EVERYTHING = ("requirements.lock", "genserve/installed_engine.py")
"""What all tests are about: another vLLM may break any of them."""


def is_choice(config: pytest.Config) -> bool:
    """Whether somebody has chosen tests, and not only whole folders."""
    return bool(config.option.keyword) or not all(Path(each).is_dir() for each in config.args)


def add_options(parser: pytest.Parser) -> None:
    """`--all` and `--touched-since`."""
    parser.addoption("--all", action="store_true", help="run the tests that are marked long too")
    parser.addoption("--touched-since", metavar="COMMIT", help="run the long tests of what has changed since then too")


class Tiers:
    """A plugin that deselects long tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._all = config.option.all or is_choice(config)
        since = config.option.touched_since
        self._changed = changed_since(since) if since and not self._all else []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves the long tests out that are not asked for."""
        if self._all:
            return
        left_out = [item for item in items if not self._runs(item)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in set(left_out)]

    def _runs(self, item: pytest.Item) -> bool:
        markers = list(item.iter_markers("long"))
        subjects = [subject for marker in markers for subject in marker.args]
        return not markers or touches(self._changed, [item.nodeid.partition("::")[0], *_EVERYTHING, *subjects])


def touches(changed: Sequence[str], subjects: Sequence[str]) -> bool:
    """Whether one of the changed files is one of `subjects`, or lies below one."""
    return any(Path(each).is_relative_to(subject) for each in changed for subject in subjects)


def changed_since(commit: str) -> list[str]:
    """The files that differ from `commit`, those not committed yet included. Raises UsageError if git cannot tell."""
    changed: list[str] = []
    for command in (["diff", "--name-only", "--no-renames", commit], ["ls-files", "--others", "--exclude-standard"]):
        done = subprocess.run(["git", *command, "--"], cwd=_ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise pytest.UsageError(f"--touched-since {commit}: {done.stderr.strip()}")
        changed += done.stdout.splitlines()
    return changed
