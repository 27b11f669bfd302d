"""The sweep of shared memory that killed engines leave."""

import mmap
import os
import time
import uuid
from pathlib import Path

import pytest

from genserve.process.leftovers import sweep_shared_memory


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """Stands for /dev/shm."""
    directory = tmp_path / "shm"
    directory.mkdir()
    return directory


def file(shm: Path, name: str, age_s: float = 3600.0) -> Path:
    """A file of that name and age."""
    path = shm / name
    path.write_bytes(bytes(4096))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def name() -> str:
    """One as vLLM makes them."""
    return f"vllm_dist_{uuid.uuid4().hex}-tp:0-[0-1]-cpushm_0"


def test_what_nobody_maps_is_removed(shm: Path) -> None:
    """And told."""
    left = file(shm, name())
    assert sweep_shared_memory(shm) == [left.name]
    assert not left.exists()
    assert sweep_shared_memory(shm) == []


def test_what_is_in_use_young_or_of_others_stays(shm: Path) -> None:
    """A live engine's file, one that an engine may be about to map, and whatever has another name."""
    used, young, other = file(shm, name()), file(shm, name(), age_s=1.0), file(shm, "psm_12345678")
    with used.open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
        assert sweep_shared_memory(shm) == []
    assert used.exists() and young.exists() and other.exists()


def test_a_mapped_name_that_is_not_utf8_does_not_disturb(shm: Path, tmp_path: Path) -> None:
    """Any process of the user may map a file of any name."""
    left = file(shm, name())
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/odd-\xff"))
    odd.write_bytes(bytes(4096))
    with odd.open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
        assert sweep_shared_memory(shm) == [left.name]


def test_without_shared_memory_there_is_nothing_to_sweep(tmp_path: Path) -> None:
    """Not every machine has /dev/shm."""
    assert sweep_shared_memory(tmp_path / "none") == []
