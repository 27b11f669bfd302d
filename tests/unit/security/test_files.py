"""Files that others replace are noticed."""

import itertools
import os
import resource
import time
from pathlib import Path

import pytest

from genserve.security.access_list import AccessList, AccessSource
from genserve.security.files import WatchedFiles
from tests.support.credentials import list_callers


@pytest.fixture(autouse=True)
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at once per second: each call comes a second after the one before."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))


def test_a_file_of_the_same_size_and_time_has_changed(tmp_path: Path) -> None:
    """As one has that is copied with its times, or unpacked."""
    path = tmp_path / "file"
    path.write_text("before")
    at = path.stat()
    watched = WatchedFiles([str(path)])
    path.write_text("behind")
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (at.st_size, at.st_mtime_ns)
    assert watched.have_changed()
    assert not watched.have_changed()


def test_a_list_that_others_could_write_is_read_once_they_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The advice of the warning is enough."""
    before = list_callers(tmp_path, a=["generate"])
    listed = AccessList(AccessSource(before.auth_file))
    (tmp_path / "new").mkdir()
    after = list_callers(tmp_path / "new", a=["generate"])
    Path(after.auth_file).chmod(0o664)
    os.replace(after.auth_file, before.auth_file)
    assert listed.of_token(before.tokens["a"]) is not None
    assert "chmod go-w" in capsys.readouterr().err
    Path(before.auth_file).chmod(0o644)
    assert listed.of_token(before.tokens["a"]) is None
    assert listed.of_token(after.tokens["a"]) is not None


def test_a_list_that_could_not_be_read_is_read_later(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a caller who was taken off it while no descriptor was left could call for ever."""
    before = list_callers(tmp_path, a=["generate"])
    listed = AccessList(AccessSource(before.auth_file))
    after = list_callers(tmp_path, b=["generate"])

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        found = [listed.of_token(before.tokens["a"]) for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert None not in found
    assert capsys.readouterr().err.count("Too many open files") == 1
    assert listed.of_token(before.tokens["a"]) is None
    assert listed.of_token(after.tokens["b"]) is not None
