"""Two hosts on one machine, as far as a process can see: each has a network, PIDs and a /dev/shm of its own."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

ADDRESSES = ("10.99.0.1", "10.99.0.2")
INTERFACE = "eth0"
_UNSHARE = ("unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
_SETTLE = "ip link set lo up && mount -t tmpfs tmpfs /dev/shm && exec sleep infinity"


class NoNamespacesError(Exception):
    """This machine gives no namespaces to this user; the message says what it said."""


@dataclass(frozen=True, slots=True)
class Host:
    """One of them, with the files of this machine. `pid`: of the first process in its namespaces."""

    pid: int
    address: str

    @property
    def within(self) -> tuple[str, ...]:
        """The beginning of a command that runs the rest of it on this host."""
        enter = ("nsenter", "-t", str(self.pid), "--user", "--preserve-credentials", "-n", "-p", "-m")
        # Without a binding: both hosts have the same two cores, and vLLM would put both engines on the first one.
        env = (f"VLLM_HOST_IP={self.address}", f"GLOO_SOCKET_IFNAME={INTERFACE}", "VLLM_CPU_OMP_THREADS_BIND=nobind")
        return (*enter, "env", *env, "OMP_NUM_THREADS=1")

    def run(self, *command: str) -> None:
        """Runs a command there; raises NoNamespacesError when it fails."""
        enter = ("nsenter", "-t", str(self.pid), "--user", "--preserve-credentials", "-n")
        _run(*enter, *command)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both, connected. They end, with every process on them, with the block. Raises NoNamespacesError."""
    holders: list[subprocess.Popen[bytes]] = []
    try:
        first = _held(holders, "--user", "--map-root-user")
        # The same user namespace, so that one link may have an end in either.
        inside = ("nsenter", "-t", str(first), "--user", "--preserve-credentials")
        second = _held(holders, within=inside)
        hosts = (Host(first, ADDRESSES[0]), Host(second, ADDRESSES[1]))
        hosts[0].run("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", str(second))
        for host in hosts:
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            host.run("ip", "link", "set", INTERFACE, "up")
        yield hosts
    finally:
        for holder in holders:
            with suppress(ProcessLookupError):
                os.killpg(holder.pid, signal.SIGKILL)
            holder.wait()


def _held(holders: list[subprocess.Popen[bytes]], *flags: str, within: Sequence[str] = ()) -> int:
    """The PID of a process that keeps new namespaces alive."""
    if missing := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        raise NoNamespacesError(f"there is no command {missing[0]}")
    command = [*within, _UNSHARE[0], *flags, *_UNSHARE[1:], "sh", "-c", _SETTLE]
    holder = subprocess.Popen(command, process_group=0, stderr=subprocess.PIPE)
    holders.append(holder)
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        if holder.poll() is not None:
            assert holder.stderr is not None
            raise NoNamespacesError(holder.stderr.read().decode(errors="replace").strip())
        for pid in _descendants(holder.pid):
            with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as cmdline:
                if cmdline.read().startswith(b"sleep\0"):
                    return pid
        time.sleep(0.02)
    raise NoNamespacesError("no process appeared in the new namespaces")


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as children:
        for child in map(int, children.read().split()):
            yield child
            yield from _descendants(child)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip()}")
