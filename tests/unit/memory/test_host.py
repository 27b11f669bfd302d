"""Who counts as a process whose memory can be reached."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from genserve.memory import host
from genserve.memory.host import ProcessIdentity, can_share, host_id


def test_memory_is_shared_with_the_daemon_that_says_it_is_here() -> None:
    """The address alone does not tell: a tunnel ends on this host as well."""
    assert can_share("127.0.0.1:50051", host_id())
    assert not can_share("10.0.0.1:50051", host_id())
    assert not can_share("127.0.0.1:50051", "")
    assert not can_share("127.0.0.1:50051", "another host")


def test_a_process_is_where_it_is() -> None:
    """This one, and its child for as long as that lives."""
    assert ProcessIdentity.own().is_here
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity.of(child.pid)
    assert identity.is_here
    child.communicate(b"\n")
    assert not identity.is_here


def test_a_pid_that_happens_to_exist_is_another_process() -> None:
    """Of another host, another PID namespace or user, or one that has the PID again."""
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
    """The kernel writes a command's name as it is."""
    name = "a) 1 2 (b"
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name.encode()!r}); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    expected = ProcessIdentity.own().start_time
    assert 0 <= ProcessIdentity.of(child.pid).start_time - expected < 1_000_000
    child.communicate(b"\n")


def test_a_kernel_that_tells_nothing_shares_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Then bytes are sent."""
    monkeypatch.setattr(host, "_BOOT_ID", host.Path(f"{tmp_path}/none"))
    assert host_id() == ""
    assert not ProcessIdentity.own().is_here
