"""Memory that was freed stays with the process."""

import subprocess
import sys

import pytest

ALLOCATE_AND_FREE = """
import resource, sys
from genserve.memory.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def once():
    blocks = [bytearray(b"x") * (4 << 20) for _ in range(4)]
    del blocks

once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    once()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def num_faults(how: str) -> int:
    """Page faults of allocating and freeing four times 4 MiB, 20 times over, in a process of its own."""
    command = [sys.executable, "-c", ALLOCATE_AND_FREE, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
def test_pages_are_not_cleared_again_for_each_block() -> None:
    """A block takes 1024 pages: with the C library's own thresholds each is a fault, every time."""
    assert num_faults("keep") < 2 * 1024
    assert num_faults("not") > 10 * 1024, "the control"
