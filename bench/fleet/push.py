"""How long a push takes to reach a fleet on several hosts: `python -m bench.fleet.push`, as root.

The trainer is on a host of its own, the replicas on two others, all links are 1 Gb/s. Each number of replicas is pushed
to through a router, which runs beside the first replica, and directly by a trainer that sends each replica a copy. What
is told: seconds until all serve the new version, copies that left the trainer, and for the router the time between the
first and the last commit. The floor is one copy at the rate of the link.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import engines
from tests.support import models
from tests.support.daemon_process import DaemonProcess

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


_UNITS = {"mbit": 125e3, "gbit": 125e6}
_PORT = 50051
_ENVIRONMENT = {**engines.ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Fleet:
    """Daemons on two hosts, and a router."""

    def __init__(self, hosts: list[Host], checkpoint: Path, num_replicas: int, directory: Path, fanout: int) -> None:
        self.trainer, *others = hosts
        places = [others[index * len(others) // num_replicas] for index in range(num_replicas)]
        self.addresses = [f"{host.address}:{_PORT + index}" for index, host in enumerate(places)]
        self._directory = directory
        self.daemons = [
            DaemonProcess(
                ["--model", str(checkpoint), *engines.flags(kv_cache_bytes=64 << 20, max_num_seqs=8), *_at(address)],
                directory / f"daemon{address}",
                _ENVIRONMENT,
                host.within,
            )
            for host, address in zip(places, self.addresses, strict=True)
        ]
        for daemon in self.daemons:
            daemon.wait_serving(300)
        self.router_address = f"{places[0].address}:50050"
        replicas = [flag for address in self.addresses for flag in ("--replica", address)]
        command = [*places[0].within, sys.executable, "-m", "genserve", "route", *_at(self.router_address), *replicas]
        self._log = directory / "router"
        with self._log.open("wb") as log:
            self.router = subprocess.Popen(
                [*command, "--fanout", str(fanout), "--silence", "30s"], stdout=subprocess.PIPE, stderr=log
            )
        assert self.router.stdout is not None
        self.router.stdout.readline()

    def skews_s(self) -> list[float]:
        """Seconds from the first to the last commit of each push."""
        return [float(text) for text in re.findall(r"the last ([0-9.]+) s after the first", self._log.read_text())]

    def close(self) -> None:
        """Ends everything."""
        self.router.kill()
        self.router.wait()
        for daemon in self.daemons:
            daemon.kill()


def measured(fleet: Fleet, checkpoints: list[Path], addresses: list[str], rounds: int) -> dict[str, Any]:
    """What pushes to these addresses cost."""
    command = [*fleet.trainer.within, sys.executable, "-m", "bench.fleet.trainer", str(rounds)]
    command += [*map(str, checkpoints), *addresses]
    size_bytes = engines.model_bytes(checkpoints[0])
    found: list[dict[str, float]] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdin is not None and trainer.stdout is not None
        for _ in range(rounds):
            before_bytes = fleet.trainer.sent_bytes()
            trainer.stdin.write("\n")
            trainer.stdin.flush()
            one = json.loads(trainer.stdout.readline())
            one["copies"] = (fleet.trainer.sent_bytes() - before_bytes) / size_bytes
            found.append(one)
    counted = found[1:]  # the first push loads without a plan, and connects
    return {name: round(median(one[name] for one in counted if name in one), 3) for name in counted[0]}


def main() -> None:
    """Prints a line of JSON for each way and number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="269", metavar="MB", help="of the model (default: %(default)s)")
    parser.add_argument("--replicas", default="1,2,4", metavar="N,N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="pushes; the first does not count")
    parser.add_argument("--fanout", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--rate", default="1gbit", metavar="RATE", help="of each link, in mbit or gbit (default: 1gbit)"
    )
    args = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = engines.model(args.size, directory)
        other = models.perturbed(checkpoint, directory / "other", seed=1, scale=0.01)
        hosts = stack.enter_context(switched(["trainer", "a", "b"], args.rate))
        floor_s = engines.model_bytes(checkpoint) / (float(args.rate[:-4]) * _UNITS[args.rate[-4:]])
        for num_replicas in map(int, args.replicas.split(",")):
            with tempfile.TemporaryDirectory() as logs, ExitStack() as running:
                fleet = Fleet(hosts, checkpoint, num_replicas, Path(logs), args.fanout)
                running.callback(fleet.close)
                routed = measured(fleet, [other, checkpoint], [fleet.router_address], args.rounds)
                routed["commit_skew_s"] = max(fleet.skews_s()[1:], default=0.0)
                direct = measured(fleet, [other, checkpoint], fleet.addresses, args.rounds)
                for way, result in (("router", routed), ("a copy each", direct)):
                    told = {"replicas": num_replicas, "way": way, "floor_s": round(floor_s, 3), **result}
                    print(json.dumps(told), flush=True)


def _at(address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    return ["--host", host, "--port", port, "--allow-insecure"]


if __name__ == "__main__":
    main()
