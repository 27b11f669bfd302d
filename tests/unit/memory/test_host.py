"""Who counts as a process whose memory can be reached."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from genserve.memory import host
from genserve.memory.host import ProcessIdentity, can_share, host_id, is_local, is_loopback

ADDRESSES = {
    "127.0.0.1:50051": True,
    "127.1.2.3:50051": True,
    "localhost:1": True,
    "[::1]:1": True,
    "dns:///localhost:1": True,
    "dns:localhost:1": True,
    "unix:/run/genserve": True,
    "unix-abstract:genserve": True,
    "10.0.0.1:1": False,
    "trainer-127.example:1": False,
    "127.example:1": False,
    "dns:///replica:1": False,
    "dns://127.0.0.1/replica:1": False,
    "ipv4:127.0.0.1:5,10.0.0.1:5": False,
    # The other end of a connection.
    "ipv4:127.0.0.1:5": True,
    "ipv6:%5B::1%5D:5": True,
    "unix:": True,
    "ipv4:10.0.0.1:5": False,
    "ipv4:192.127.0.1:5": False,
    "ipv6:%5Bfe80::1%5D:5": False,
    "ipv6:%5B::10%5D:5": False,
    "": False,
}


@pytest.mark.parametrize(("address", "local"), ADDRESSES.items())
def test_who_is_on_this_host(address: str, local: bool) -> None:
    """By the address alone; whether the daemon there is on this host is told by its host id."""
    assert is_local(address) is local
    assert can_share(address, host_id()) is local
    assert not can_share(address, "")
    assert not can_share(address, "another host")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("[::1]", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "", "example.org", "127.0.0.1.example.org")],
)
def test_who_listens_for_this_host_alone(host: str, loopback: bool) -> None:
    """A name that begins as an address is a name."""
    assert is_loopback(host) is loopback


def test_a_process_is_where_it_is() -> None:
    """This one, and its child for as long as that lives."""
    assert ProcessIdentity.own().is_here
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = ProcessIdentity(host_id(), child.pid, host._start_time(child.pid))
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
    assert 0 <= host._start_time(child.pid) - expected < 1_000_000
    child.communicate(b"\n")


def test_a_kernel_that_tells_nothing_shares_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Then bytes are sent."""
    monkeypatch.setattr(host, "_BOOT_ID", host.Path(f"{tmp_path}/none"))
    assert host_id() == ""
    assert not ProcessIdentity("", os.getpid(), host._start_time(os.getpid())).is_here
