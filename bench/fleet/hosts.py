"""Hosts on one machine, joined by a switch: each has a network namespace, and links of a set rate. Needs root."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

_PREFIX = "genserve-bench-"
_SWITCH = f"{_PREFIX}switch"
_BURST = "1mb"
_LATENCY = "50ms"


@dataclass(frozen=True, slots=True)
class Host:
    """One of them. `within`: the beginning of a command that runs the rest of it there."""

    name: str
    address: str

    @property
    def within(self) -> tuple[str, ...]:
        """Enters its network."""
        return ("ip", "netns", "exec", _PREFIX + self.name)

    def sent_bytes(self) -> int:
        """Bytes that have left it, with the headers of Ethernet, IP and TCP."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(subprocess.run([*self.within, "cat", path], check=True, capture_output=True, text=True).stdout)


@contextmanager
def switched(names: Sequence[str], rate: str) -> Iterator[list[Host]]:
    """So many hosts, whose links take `rate` each way, as tc writes it: 1gbit. Raises CalledProcessError, with what ip
    or tc said, where they may not do this."""
    with ExitStack() as stack:
        _namespace(_SWITCH, stack)
        _run("ip", "-n", _SWITCH, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", _SWITCH, "link", "set", "br0", "up")
        hosts = []
        for number, name in enumerate(names, 1):
            host, space, port = Host(name, f"10.98.0.{number}"), _PREFIX + name, f"port{number}"
            _namespace(space, stack)
            _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", _SWITCH)
            _run("ip", "-n", space, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", _SWITCH, "link", "set", port, "master", "br0")
            for where, device in ((space, "eth0"), (_SWITCH, port)):
                _run("ip", "-n", where, "link", "set", device, "up")
                shape = ("root", "tbf", "rate", rate, "burst", _BURST, "latency", _LATENCY)
                _run("tc", "-n", where, "qdisc", "add", "dev", device, *shape)
            hosts.append(host)
        yield hosts


def _namespace(name: str, stack: ExitStack) -> None:
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)  # of a run that was killed
    _run("ip", "netns", "add", name)
    stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
