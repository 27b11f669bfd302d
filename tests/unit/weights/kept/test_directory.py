"""A directory that always has a whole version, whenever its daemon dies."""

import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from genserve.weights.kept.checkpoint import digest_of, open_kept
from genserve.weights.kept.directory import RECORD, KeptDirectory, KeptError, KeptRecord, KeptVersion
from tests.support.patience import slow
from tests.unit.weights.kept.versions import SMALL_FILES, digest_of_version, model_files, text_of
from tests.unit.weights.kept.writer import keep

ROOT = Path(__file__).parents[4]


def is_whole(kept: KeptVersion) -> bool:
    """Whether it is the version that its record says, with all that is needed to load it."""
    digest = digest_of(open_kept(kept.path))
    beside = all((kept.path / name).read_text() == text_of(name) for name in SMALL_FILES)
    return beside and digest == kept.record.content_digest == digest_of_version(kept.record.weight_version)


def test_the_latest_version_and_the_one_before_are_kept(tmp_path: Path) -> None:
    """Older ones are removed, and a later start finds the same."""
    files, directory = model_files(tmp_path / "model"), KeptDirectory(tmp_path / "kept")
    assert directory.latest is None and directory.before("push 1") is None
    for number in (1, 2, 3):
        keep(directory, number, files)
    for found in (directory, KeptDirectory(tmp_path / "kept")):
        assert found.latest is not None and found.latest.record == KeptRecord(3, "push 3", digest_of_version(3))
        before = found.before("push 3")
        assert before is not None and before.record.weight_version == 2
        assert is_whole(found.latest) and is_whole(before)
    assert {each.name for each in (tmp_path / "kept").iterdir()} == {".lock", "current", "previous"}


def test_a_record_of_an_older_genserve_has_no_epoch(tmp_path: Path) -> None:
    """It is read as before; one that is no number is not."""
    record = KeptRecord(3, "push 3", "digest", 7)
    path = tmp_path / RECORD
    path.write_text(record.to_json())
    assert KeptRecord.read(path) == record
    path.write_text(record.to_json().replace('"fleet_epoch": 7', '"other": 7'))
    assert KeptRecord.read(path) == KeptRecord(3, "push 3", "digest")
    for damaged in ('"7"', "-7", "7.5", "true", str(1 << 64), str(1 << 63)):
        path.write_text(record.to_json().replace('"fleet_epoch": 7', f'"fleet_epoch": {damaged}'))
        with pytest.raises(KeptError):
            KeptRecord.read(path)


def test_the_version_before_one_that_is_not_kept_is_the_latest(tmp_path: Path) -> None:
    """The disk was full, or it is still being written."""
    files, directory = model_files(tmp_path / "model"), KeptDirectory(tmp_path / "kept")
    for number in (1, 2):
        keep(directory, number, files)
    before = directory.before("push 3")
    assert before is not None and before.record.weight_version == 2


def test_a_version_that_is_moved_away_leaves_the_one_before(tmp_path: Path) -> None:
    """As errors tell people to do."""
    files, directory = model_files(tmp_path / "model"), KeptDirectory(tmp_path / "kept")
    for number in (1, 2):
        keep(directory, number, files)
    (tmp_path / "kept" / "current").rename(tmp_path / "away")
    assert directory.latest is not None and directory.latest.record.weight_version == 1
    keep(directory, 3, files)
    before = directory.before("push 3")
    assert before is not None and before.record.weight_version == 1


class Crash(BaseException):
    """The process is gone: nothing that follows is done."""


class Crashing:
    """A function of `os` that works so many times, and then crashes."""

    def __init__(self, name: str, left: int) -> None:
        self._call = getattr(os, name)
        self.left = left

    def __call__(self, *args: object, **options: object) -> object:
        self.left -= 1
        if self.left < 0:
            raise Crash
        return self._call(*args, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rename", "mkdir", "fsync", "unlink", "rmdir"])
def test_a_crash_at_any_step_leaves_a_whole_version(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each call that changes the directory: the start after it finds the version before or the new one, and
    keeps the next one as if nothing had been."""
    files, num_calls = model_files(tmp_path / "model"), 0
    while True:
        path = tmp_path / f"kept {num_calls}"
        for number in (1, 2):
            keep(KeptDirectory(path), number, files)
        crashing = Crashing(name, num_calls)
        with monkeypatch.context() as patched, suppress(Crash):
            patched.setattr(os, name, crashing)
            keep(KeptDirectory(path), 3, files)
        if crashing.left >= 0:  # it was called as often as that, and is done
            break
        for version in (path / "current", path / "previous"):  # somebody may be reading them
            assert not version.exists() or is_whole(KeptVersion(version, KeptRecord.read(version / RECORD)))
        check_kept(path, {2, 3})
        directory = KeptDirectory(path)
        keep(directory, 4, files)
        check_kept(path, {4})
        num_calls += 1
    assert num_calls > 0


def check_kept(path: Path, numbers: set[int]) -> None:
    """The latest version is one of these, and it and the one before are whole; nothing else is there."""
    directory = KeptDirectory(path)
    latest = directory.latest
    assert latest is not None and is_whole(latest)
    assert latest.record.weight_version in numbers
    before = directory.before(latest.record.push_id)
    assert before is not None and is_whole(before)
    assert before.record.weight_version < latest.record.weight_version
    assert {each.name for each in path.iterdir()} == {".lock", "current", "previous"}


LONG = pytest.mark.long("genserve/weights/kept")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=LONG) for seed in range(1, 30))])
async def test_a_process_that_is_killed_leaves_a_whole_version(tmp_path: Path, seed: int) -> None:
    """At some moment of a write, with SIGKILL: it has at least what it has said."""
    chance = random.Random(seed)
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.weights.kept.writer", str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert writer.stdout is not None
        said = [int(writer.stdout.readline()) for _ in range(chance.randint(2, 4))]
        with pytest.raises(KeptError, match="its own directory"):
            KeptDirectory(tmp_path / "kept")
        await slow(chance.random() * 0.02)
        writer.kill()
        said += map(int, writer.stdout.read().split())
        writer.wait()
        check_kept(tmp_path / "kept", {said[-1], said[-1] + 1})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2, "weight_version": 1, "push_id": "", "content_digest": "0"}',
        '{"format": 1, "weight_version": 0, "push_id": "", "content_digest": "0"}',
        '{"format": 1, "weight_version": 1, "push_id": 1, "content_digest": "0"}',
        '{"format": 1, "weight_version": 1, "push_id": ""}',
    ],
)
def test_a_record_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    """With what to do about it."""
    directory = KeptDirectory(tmp_path)
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / RECORD).write_text(text)
    with pytest.raises(KeptError, match=f"{tmp_path}/current/{RECORD}.*: move {tmp_path}/current away"):
        _ = directory.latest


@pytest.mark.parametrize(
    ("field", "value"), [("weight_version", 10**18), ("push_id", "x" * 257), ("push_id", "\ud800")]
)
def test_a_record_that_no_answer_could_tell_is_refused(tmp_path: Path, field: str, value: object) -> None:
    """The daemon would fail at every question what it serves."""
    keep(KeptDirectory(tmp_path / "kept"), 1, model_files(tmp_path / "model"))
    record = tmp_path / "kept" / "current" / RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | {field: value}))
    with pytest.raises(KeptError, match=f"{field}.*: move {record.parent} away"):
        _ = KeptDirectory(tmp_path / "kept").latest


def test_versions_on_another_disk_are_kept_by_links(tmp_path: Path) -> None:
    """Somebody has moved one there, for room: it is served, replaced, and in the end its link is removed."""
    files, directory = model_files(tmp_path / "model"), KeptDirectory(tmp_path / "kept")
    keep(directory, 1, files)
    (tmp_path / "kept" / "current").rename(tmp_path / "elsewhere")
    (tmp_path / "kept" / "current").symlink_to(tmp_path / "elsewhere")
    assert directory.latest is not None and is_whole(directory.latest)
    for number in (2, 3, 4):
        keep(directory, number, files)
    check_kept(tmp_path / "kept", {4})
    assert is_whole(KeptVersion(tmp_path / "elsewhere", KeptRecord.read(tmp_path / "elsewhere" / RECORD)))


def test_a_link_to_a_disk_that_is_not_there_is_reported(tmp_path: Path) -> None:
    """The version before it would be served in its place, and nobody would know."""
    directory = KeptDirectory(tmp_path)
    (tmp_path / "current").symlink_to(tmp_path / "not mounted")
    with pytest.raises(KeptError, match=f"move {tmp_path}/current away"):
        _ = directory.latest


def test_a_directory_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    """While its daemon serves."""
    files, directory = model_files(tmp_path / "model"), KeptDirectory(tmp_path / "kept")
    keep(directory, 1, files)
    shutil.rmtree(tmp_path / "kept")
    keep(directory, 2, files)
    assert directory.latest is not None and is_whole(directory.latest)
    assert directory.before("push 2") is None


def test_a_directory_that_was_removed_may_be_that_of_another_daemon(tmp_path: Path) -> None:
    """Which has made it anew: nobody else writes there."""
    files, directory = model_files(tmp_path / "model"), KeptDirectory(tmp_path / "kept")
    keep(directory, 1, files)
    (tmp_path / "kept").rename(tmp_path / "away")
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.weights.kept.writer", str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        with pytest.raises(KeptError, match="its own directory"):
            directory.begin()
    finally:
        writer.kill()
        writer.communicate()
    keep(directory, 9, files)
    assert directory.latest is not None and directory.latest.record.weight_version == 9
