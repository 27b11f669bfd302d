"""How much memory there is, as the kernel tells."""

from pathlib import Path

import pytest

from genserve.memory.available import available_memory_bytes


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 4_000_000 * 1024), ("1000000", 1_000_000 - (700_000 - 200_000)), ("1", 0)]
)
def test_available_memory_is_the_lesser_of_machine_and_container(tmp_path: Path, limit: str, expected: int) -> None:
    """A container's limit counts, without the cached files that go when memory is needed."""
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 8000000 kB\nMemAvailable:    4000000 kB\n")
    (tmp_path / "self/cgroup").write_text("0::/box\n")
    group = tmp_path / "groups/box"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(limit + "\n")
    (group / "memory.current").write_text("700000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 200000\n")
    assert available_memory_bytes(tmp_path, tmp_path / "groups") == expected
    assert available_memory_bytes(tmp_path, tmp_path / "none") == 4_000_000 * 1024
