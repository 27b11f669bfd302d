"""What becomes of a checkup whose daemons cannot be tried; without any."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from genserve.doctor import checkup
from genserve.doctor.checkup import CheckupOptions, check_up
from genserve.doctor.children import Children
from genserve.doctor.machine import facts as machine
from genserve.doctor.serve_flags import ServeFlags
from genserve.doctor.trial import tiny_model
from genserve.doctor.trial.exercise import environment
from genserve.doctor.trial.findings import WayFound
from genserve.doctor.verdict import Level, Section
from genserve.errors import InvalidFieldError
from tests.support.refusals import refuses
from tests.unit.doctor.conftest import machine as a_machine


@pytest.fixture(autouse=True)
def looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""

    async def look(*_: object) -> machine.MachineFacts:
        return a_machine()

    monkeypatch.setattr(machine, "look", look)


async def checked(ways: str | None, *, machine_only: bool = False) -> list[Section]:
    """All sections, which are shown as well."""
    shown: list[Section] = []
    options = CheckupOptions(None, ways, ServeFlags.parse(["--max-active-requests", "4"]), 1.0, machine_only)
    with Children() as children:
        sections, _ = await check_up(options, children, lambda _: None, shown.append)
    assert shown == sections
    return sections


@pytest.mark.parametrize("machine_only", [True, False])
async def test_a_way_that_the_machine_does_not_have_is_refused(*, machine_only: bool) -> None:
    """Also where no daemon would be started."""
    with refuses(InvalidFieldError, field="ways", says="'host'"):
        await checked("host", machine_only=machine_only)


async def test_a_disk_that_is_full_is_reported_with_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And everything that needs none of it."""

    def write(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkup.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(tiny_model, "write", write)
    sections = await checked("beside")
    assert [section.title for section in sections] == ["machine", "daemons", "what fits (computed)"]
    (verdict,) = sections[1].verdicts
    assert (verdict.level, verdict.check) == (Level.FAIL, "temporary files")
    assert str(tmp_path) in verdict.finding and "No space left" in verdict.finding
    assert os.listdir(tmp_path) == []


async def test_temporary_files_of_daemons_go_with_the_doctors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sockets and caches of processes that are killed stay where they are."""
    monkeypatch.setattr(checkup.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("genserve.doctor.trial.exercise.MAX_SOCKET_PATH_BYTES", 1000)
    scratches: list[Path] = []

    async def exercise(subject: Any, way: str, name: str, children: Children, scratch: Path, _: float) -> WayFound:
        os.mkdir(os.path.join(environment(scratch)["TMPDIR"], "left"))
        scratches.append(scratch)
        assert subject.max_requests == 4
        return WayFound(way, name)

    monkeypatch.setattr(checkup, "exercise", exercise)
    await checked("beside")
    assert len(scratches) == 1
    assert os.listdir(tmp_path) == []


def test_a_path_that_is_too_long_for_a_socket_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would not start there."""
    monkeypatch.setenv("TMPDIR", "/own")
    assert environment(Path("/t" * 35))["TMPDIR"] == "/t" * 35
    assert environment(Path("/t" * 36))["TMPDIR"] == "/own"
