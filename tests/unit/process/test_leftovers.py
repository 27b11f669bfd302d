"""Temporary directories of daemons that were killed."""

import os
from pathlib import Path

import pytest

from genserve.process.leftovers import KINDS, prefix, sweep
from tests.support.idle_process import idle_process


def test_a_directory_of_another_container_stays(tmp_path: Path) -> None:
    """Both have the same temporary directory, and its process has another id here, or none."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    here, elsewhere = (tmp_path / f"genserve-ingest-999999999-{each}-abc" for each in (namespace, namespace + 1))
    for each in (here, elsewhere):
        each.mkdir()
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == [elsewhere]


@pytest.mark.parametrize("kind", KINDS)
def test_only_directories_of_this_users_dead_daemons_are_removed(kind: str, tmp_path: Path) -> None:
    """Another daemon may run, and others have names of their own."""
    dead, alive = (tmp_path / f"genserve-{kind}-{pid}-abc" for pid in (999999999, idle_process().pid))
    others = [tmp_path / f"genserve-{kind}-x", tmp_path / "genserve-mine-999999999-abc"]
    for each in (dead, alive, *others):
        each.mkdir()
        (each / "file").touch()
    sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([alive, *others])


def test_a_directory_tells_whose_it_is(tmp_path: Path) -> None:
    """Its process is found by its name; no other kind would be swept."""
    mine = tmp_path / f"{prefix('start')}abc"
    mine.mkdir()
    sweep(tmp_path)
    assert mine.is_dir()
    assert str(os.getpid()) in mine.name
    dead = mine.rename(tmp_path / mine.name.replace(str(os.getpid()), "999999999"))
    sweep(tmp_path)
    assert not dead.exists()
    with pytest.raises(ValueError, match="'other' is none of ingest"):
        prefix("other")
