"""Which processes are the daemon's own, and what they have open."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from genserve.memory.daemon_processes import DaemonProcesses, file_id
from tests.support.descriptor_holders import child, stranger


@contextmanager
def grandchildren() -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A child and the PID of its own child, both of which end with the input of the first."""
    script = "sleep 600 & echo $!; cat >/dev/null; kill $!"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())


@pytest.fixture
def memory() -> Iterator[int]:
    """The descriptor of a file."""
    fd = os.memfd_create("genserve-push-unit")
    yield fd
    os.close(fd)


def test_this_process_is_the_daemon_unless_another_one_is_named() -> None:
    """The default is for the daemon itself."""
    assert DaemonProcesses() == DaemonProcesses(os.getpid())


def test_descendants_are_the_daemons_and_its_parents_are_not() -> None:
    """At any depth; the search ends at the first process of all."""
    with grandchildren() as (process, grandchild):
        for pid in (os.getpid(), process.pid, grandchild):
            assert DaemonProcesses().include(pid)
        assert DaemonProcesses(process.pid).include(grandchild)
        assert not DaemonProcesses(process.pid).include(os.getpid())
        assert not DaemonProcesses(grandchild).include(process.pid)


def test_siblings_and_those_whose_parent_has_ended_are_strangers() -> None:
    """A trainer may have started the daemon and a process that pushes."""
    with child() as one, child() as other, stranger() as orphan:
        assert not DaemonProcesses(one.pid).include(other.pid)
        assert not DaemonProcesses().include(orphan)


def test_a_thread_is_as_good_as_its_process() -> None:
    """/proc/TID works like /proc/PID, though it is not listed."""
    done = threading.Event()
    running = threading.Thread(target=done.wait)
    running.start()
    assert running.native_id is not None
    try:
        assert running.native_id != os.getpid()
        assert DaemonProcesses().include(running.native_id)
    finally:
        done.set()
        running.join()


def test_a_process_that_has_ended_is_an_error() -> None:
    """An OSError, as of any other path that leads nowhere."""
    with child() as process:
        pid = process.pid
    with pytest.raises(OSError, match=str(pid)):
        DaemonProcesses().include(pid)


def test_descriptors_of_a_file_are_found_wherever_they_are(memory: int) -> None:
    """In the process, also where it has two, and in its children; nobody else's, and of no other file."""
    second = os.dup(memory)
    other = os.memfd_create("genserve-push-other")
    wanted = file_id(os.fstat(memory))
    with child(memory) as one, child() as without:
        found = list(DaemonProcesses().descriptors_of(wanted))
        assert sorted(found) == sorted([(os.getpid(), memory), (os.getpid(), second), (one.pid, memory)])
        assert list(DaemonProcesses(one.pid).descriptors_of(wanted)) == [(one.pid, memory)]
        assert list(DaemonProcesses(without.pid).descriptors_of(wanted)) == []
    os.close(second)
    os.close(other)
    assert list(DaemonProcesses().descriptors_of(wanted)) == [(os.getpid(), memory)]


def test_a_child_that_has_ended_and_was_not_waited_for_has_nothing_open(memory: int) -> None:
    """A zombie's descriptors are nobody's to list; the others are listed all the same."""
    with child(memory) as zombie, child(memory) as alive:
        zombie.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        found = set(DaemonProcesses().descriptors_of(file_id(os.fstat(memory))))
        assert found == {(os.getpid(), memory), (alive.pid, memory)}
