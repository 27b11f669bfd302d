"""Ids that are read when their writer has died."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from genserve.memory.id_table import MAX_ID_BYTES, IdTable, ids_in


@pytest.fixture
def table() -> Iterator[IdTable]:
    """An empty one."""
    table = IdTable.create()
    yield table
    table.close()


def test_ids_of_a_killed_process_are_all_there(table: IdTable) -> None:
    """It dies in the instant after it has written the last one."""
    program = (
        "import os, signal\n"
        "from genserve.memory.id_table import IdTable\n"
        f"table = IdTable({table.fd})\n"
        "for i in range(1000):\n"
        "    live = {f'live{j}' for j in range(i + 1)}\n"
        "    table.add(f'ü{i}', live)\n"
        "    table.add(f'live{i}', live)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], pass_fds=[table.fd], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert {f"live{i}" for i in range(1000)} <= set(ids_in(table.fd))


@pytest.mark.slow
def test_the_table_is_as_large_as_the_ids_in_use_require(table: IdTable) -> None:
    """Rows of ids that are over are used again."""
    at_first = os.fstat(table.fd).st_size
    for number in range(5000):
        table.add(f"id{number}", {f"id{number - i}" for i in range(100)})
    assert os.fstat(table.fd).st_size == at_first
    assert {f"id{4999 - i}" for i in range(100)} <= set(ids_in(table.fd))
    for number in range(1000):
        table.add(f"live{number}", {f"live{i}" for i in range(1000)})
    assert at_first < os.fstat(table.fd).st_size <= 16 * at_first
    assert {f"live{number}" for number in range(1000)} <= set(ids_in(table.fd))


def test_the_successor_begins_with_an_empty_table(table: IdTable) -> None:
    """What its predecessor left was read before."""
    table.add("left behind", set())
    successor = IdTable(os.dup(table.fd))
    assert list(ids_in(table.fd)) == []
    successor.add("own", set())
    assert list(ids_in(table.fd)) == ["own"]
    successor.close()


def test_the_longest_id_fits_and_a_longer_one_is_refused(table: IdTable) -> None:
    """256 characters of four bytes, with what vLLM adds to them."""
    longest = "255_" + "𝔸" * 256 + "-12345678"
    table.add(longest, set())
    assert list(ids_in(table.fd)) == [longest]
    with pytest.raises(ValueError, match="longer than"):
        table.add("x" * (MAX_ID_BYTES + 1), set())
