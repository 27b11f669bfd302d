"""How many bytes of a push have arrived."""

import multiprocessing
import os

import pytest

from genserve.memory.arena import Arrival, ArrivedBytes


def _read(path: str, told: "multiprocessing.SimpleQueue[int]", go_on: "multiprocessing.SimpleQueue[int]") -> None:
    with ArrivedBytes(path) as arrived:
        while go_on.get():
            told.put(arrived.num_bytes)


def test_another_process_reads_what_was_told_last() -> None:
    """Also a number that is larger than any memory, and after the daemon has closed it."""
    context = multiprocessing.get_context("spawn")
    arrival, told, go_on = Arrival(), context.SimpleQueue(), context.SimpleQueue()
    reader = context.Process(target=_read, args=(arrival.path, told, go_on), daemon=True)
    reader.start()
    seen = []
    for num_bytes in (0, 5, 1 << 44):
        arrival.tell(num_bytes)
        go_on.put(1)
        seen.append(told.get())
    arrival.close()
    arrival.tell(7)  # nobody waits for it any more
    go_on.put(1)
    seen.append(told.get())
    go_on.put(0)
    reader.join(30)
    assert seen == [0, 5, 1 << 44, 1 << 44]
    assert reader.exitcode == 0


def test_it_takes_no_memory_and_no_descriptor_is_left() -> None:
    """Its size is a number, not bytes."""
    before = len(os.listdir("/proc/self/fd"))
    arrival = Arrival()
    arrival.tell(1 << 40)
    assert os.stat(arrival.path).st_blocks == 0
    with ArrivedBytes(arrival.path):
        pass
    path = arrival.path
    arrival.close()
    arrival.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        ArrivedBytes(path)
