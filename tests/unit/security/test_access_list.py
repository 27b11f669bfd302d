"""Lists of callers that change while somebody uses them."""

import itertools
import os
import time
from pathlib import Path

import pytest

from genserve.security.access import AccessError
from genserve.security.access_list import AccessList, AccessSource, open_access_list, take_environment
from tests.support.credentials import list_callers


@pytest.fixture(autouse=True)
def looks_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at once per second: each call comes a second after the one before."""
    seconds = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))


def test_caller_removed_from_the_list_is_unknown_from_then_on(tmp_path: Path) -> None:
    before = list_callers(tmp_path, first=["generate"])
    listed = AccessList(AccessSource(before.auth_file))
    assert listed.of_token(before.tokens["first"]) is not None
    after = list_callers(tmp_path, second=["trainer"])
    assert listed.of_token(before.tokens["first"]) is None
    assert listed.of_token(after.tokens["second"]) is not None


def test_a_file_behind_a_symbolic_link_may_be_exchanged(tmp_path: Path) -> None:
    """As Kubernetes does it."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    before, after = list_callers(tmp_path / "one", a=["generate"]), list_callers(tmp_path / "two", a=["generate"])
    link = tmp_path / "data"
    link.symlink_to("one")
    listed = AccessList(AccessSource(str(link / "callers.toml")))
    assert listed.of_token(before.tokens["a"]) is not None
    (tmp_path / "new").symlink_to("two")
    os.replace(tmp_path / "new", link)
    assert listed.of_token(before.tokens["a"]) is None
    assert listed.of_token(after.tokens["a"]) is not None


def test_a_file_that_is_wrong_or_gone_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callers = list_callers(tmp_path, a=["generate"])
    listed = AccessList(AccessSource(callers.auth_file))
    path = Path(callers.auth_file)
    path.write_text("[[tok")
    assert listed.of_token(callers.tokens["a"]) is not None
    path.unlink()
    assert listed.of_token(callers.tokens["a"]) is not None
    told = capsys.readouterr().err
    assert told.count(callers.auth_file) == 2
    again = list_callers(tmp_path, b=["generate"])
    assert listed.of_token(callers.tokens["a"]) is None
    assert listed.of_token(again.tokens["b"]) is not None


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    callers = list_callers(tmp_path, a=["generate"])
    Path(callers.auth_file).chmod(mode)
    with pytest.raises(AccessError, match="chmod go-w"):
        AccessList(AccessSource(callers.auth_file))


def test_a_pipe_in_place_of_the_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    began_s = time.perf_counter()
    with pytest.raises(AccessError, match="pipe"):
        AccessList(AccessSource(str(tmp_path / "pipe")))
    assert time.perf_counter() - began_s < 60.0


def test_the_environment_is_taken_away_from_processes_that_start_later() -> None:
    environment = {"GENSERVE_AUTH_TOKENS": "trainer:a-token-of-some-length", "HOME": "/"}
    access = take_environment(environment)
    assert environment == {"HOME": "/"}
    listed = open_access_list(AccessSource(environment=access))
    assert listed is not None
    assert listed.of_token("a-token-of-some-length") is not None


def test_without_a_list_there_is_none() -> None:
    assert open_access_list(AccessSource()) is None
