"""Temporary directories of daemons that were killed."""

import os
from pathlib import Path

import pytest

from genserve.leftovers import KINDS, prefix, sweep
from tests.support.idle_process import idle_process


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
    sweep(tmp_path, proc=tmp_path)
    assert not mine.exists() and str(os.getpid()) in mine.name
    with pytest.raises(ValueError, match="'other' is none of ingest"):
        prefix("other")
