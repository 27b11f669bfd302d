"""Which processes can share memory with this one."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from genserve.memory import host
from genserve.memory.host import ProcessIdentity, can_share, host_id


def test_memory_is_shared_only_with_a_daemon_of_this_host_id() -> None:
    """The address alone proves nothing: a tunnel ends on this host, too."""
    assert can_share("127.0.0.1:50051", host_id())
    assert not can_share("10.0.0.1:50051", host_id())
    assert not can_share("127.0.0.1:50051", "")
    assert not can_share("127.0.0.1:50051", "another host")


def test_process_is_here_only_while_it_lives() -> None:
    """This process, and its child."""
    assert ProcessIdentity.own().is_here
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    assert identity.is_here
    child.communicate(b"\n")
    assert not identity.is_here


def test_a_pid_that_happens_to_exist_is_another_process() -> None:
    """One of another host, PID namespace or user, or a later one with the same PID."""
    own = ProcessIdentity.own()
    assert not replace(own, start_time=own.start_time - 1).is_here
    assert not replace(own, pid=1).is_here or os.getpid() == 1
    boot, namespace, user = own.host_id.split(":")
    for other in (
        f"{boot[:-1]}x:{namespace}:{user}",
        f"{boot}:{int(namespace) + 1}:{user}",
        f"{boot}:{namespace}:1",
        "",
    ):
        assert not replace(own, host_id=other).is_here


def test_a_name_with_parentheses_does_not_move_the_start_time() -> None:
    """The kernel does not escape the name of a command in /proc/PID/stat."""
    name = "a) 1 2 (b"
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name.encode()!r}); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    expected = ProcessIdentity.own().start_time
    assert 0 <= ProcessIdentity.of(child.pid).start_time - expected < 1_000_000
    child.communicate(b"\n")


def test_host_without_a_boot_id_shares_no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """The client sends the bytes instead."""
    monkeypatch.setattr(host, "BOOT_ID", host.Path(f"{tmp_path}/none"))
    assert host_id() == ""
    assert not ProcessIdentity.own().is_here
