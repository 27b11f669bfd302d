"""A Ray cluster of one node, and `genserve up --ray` on it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.faults.up_process import UpProcess
from tests.support.ports import free_port

NUM_CPUS = 2
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 90.0
_ASK_TIMEOUT_S = 150.0
_ACTOR = "ray::ReplicaActor"
_OBJECT_STORE_BYTES = 80 << 20

_PROGRAM = """
import json, logging, ray
ray.init(address={address!r}, namespace={namespace!r}, log_to_driver=False, logging_level=logging.ERROR)
{body}
"""
_LEFT = """
groups = ray.util.placement_group_table().values()
print(json.dumps({
    "actors": ray.util.list_named_actors(all_namespaces=True),
    "groups": [each["name"] for each in groups if each["state"] != "REMOVED"],
    "node": ray.nodes()[0]["NodeManagerAddress"],
    "used_cpus": ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0.0),
}))
"""


class RayCluster:
    """`ray start --head` on free ports, with everything that Ray starts for it."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._directory = tempfile.mkdtemp(prefix="ray-")  # a short path: there are sockets below it
        # As UpProcess: a test run of several processes binds their engines to cores.
        env = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_OMP_THREADS_BIND"}
        options = {
            "port": 0,
            "node-ip-address": "127.0.0.1",  # which Ray replaces by another address of this host, if it has one
            "ray-client-server-port": free_port(),
            "num-cpus": NUM_CPUS,
            "num-gpus": 0,
            "object-store-memory": _OBJECT_STORE_BYTES,
            "include-dashboard": "false",
            "temp-dir": self._directory,
        }
        flags = ["--head", "--block", "--disable-usage-stats", *(f"--{name}={each}" for name, each in options.items())]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ray.scripts.scripts", "start", *flags],
                stdout=output,
                stderr=output,
                env=env,
                process_group=0,
            )
        self._seen = {self.process.pid}
        self.node_address = ""
        try:
            self.address = self._started()
            self.left()
        except BaseException:
            self.end()
            raise

    def _started(self) -> str:
        found = Path(self._directory) / "ray_current_cluster"
        until_s = time.monotonic() + _START_TIMEOUT_S
        while "block forever" not in self._log.read_text():
            if time.monotonic() > until_s or self.process.poll() is not None:
                raise AssertionError(f"Ray did not start:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.05)
        return found.read_text().strip()

    def processes(self) -> list[psutil.Process]:
        """All that it has started and that run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.process.pid).children(recursive=True)
            self._seen.update(each.pid for each in found)
            return found
        return []

    @property
    def actors(self) -> list[int]:
        """The processes of the actors of replicas."""
        return [each.pid for each in self.processes() if _command(each).startswith(_ACTOR)]

    @property
    def daemons(self) -> list[int]:
        """The processes of their daemons."""
        actors = self.actors
        found = [each for each in self.processes() if " serve " in _command(each)]
        return [each.pid for each in found if _parent(each) in actors]

    def kill_actor(self, number: int, name: str = "genserve") -> None:
        """As a user of Ray does, who thinks that this ends it."""
        self._ask(f"ray.kill(ray.get_actor('replica-{number}'))\nprint('null')", f"genserve-{name}")

    def left(self) -> dict[str, Any]:
        """What any fleet has in it."""
        left = dict(self._ask(_LEFT, "genserve-left"))
        self.node_address = left.pop("node")
        return left

    def until_free(self) -> dict[str, Any]:
        """The same, when Ray has had some time to remove it."""
        until_s = time.monotonic() + _STOP_TIMEOUT_S
        while (left := self.left()) != {"actors": [], "groups": [], "used_cpus": 0.0} and time.monotonic() < until_s:
            time.sleep(0.2)
        return left

    def until_groups(self, names: list[str]) -> list[str]:
        """The placement groups that there are, these when Ray has had some time to remove others."""
        until_s = time.monotonic() + _STOP_TIMEOUT_S
        while (left := list(self.left()["groups"])) != names and time.monotonic() < until_s:
            time.sleep(0.2)
        return left

    def _ask(self, body: str, namespace: str) -> Any:
        program = _PROGRAM.format(address=self.address, namespace=namespace, body=body)
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def end(self) -> list[int]:
        """Ends it; the processes that have to be killed afterwards."""
        self.processes()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_STOP_TIMEOUT_S)
        running = []
        for pid in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                running.append(psutil.Process(pid))
        _, left = psutil.wait_procs(running, timeout=60)
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        return [each.pid for each in left]


class RayUpProcess(UpProcess):
    """`genserve up --ray`. Its daemons are those of the cluster, whose only fleet it is."""

    def __init__(self, cluster: RayCluster, flags: Sequence[str], log: Path) -> None:
        self.cluster = cluster
        super().__init__(["--ray", cluster.address, *flags], log)

    @property
    def daemons(self) -> list[int]:
        """The processes of the daemons that run."""
        found = self.cluster.daemons
        self._groups.update(found)
        return found

    def driver(self) -> psutil.Process:
        """The process that talks to Ray."""
        children = psutil.Process(self.process.pid).children()
        (found,) = (each for each in children if "genserve.placement.ray" in _command(each))
        return found


def _command(process: psutil.Process) -> str:
    try:
        return re.sub(r"\s+", " ", " ".join(process.cmdline()))
    except psutil.NoSuchProcess:
        return ""


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None
