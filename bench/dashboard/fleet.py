"""The fleet in the picture: replicas on the demo model whose workers fail as ordered, and their router."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.faulty_worker import FAULTS_VARIABLE, FAULTY_EXTENSION

ROUTER = "router"
_FLAGS = ("--metrics-port", "0", "--worker-extension-cls", FAULTY_EXTENSION)
_METRICS = re.compile(r"^genserve: metrics: http://([^/]+)/metrics$", re.MULTILINE)
_STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Fleet:
    """`address` of the router; `targets`: where the series of each process are, by its name; `faults`: the directory
    for orders to the workers of the last replica (tests.support.faulty_worker)."""

    address: str
    targets: Mapping[str, str]
    faults: Path


@contextmanager
def running(model: Path, num_replicas: int, directory: Path) -> Iterator[Fleet]:
    """The fleet, for as long as the block runs. Each replica has one core."""
    faults = directory / "faults"
    faults.mkdir()
    nobody = directory / "no-faults"
    nobody.mkdir()
    with ExitStack() as stack:
        daemons: list[DaemonProcess] = []
        for number in range(num_replicas):
            orders = faults if number == num_replicas - 1 else nobody
            core = str(sorted(os.sched_getaffinity(0))[number % len(os.sched_getaffinity(0))])
            daemon = DaemonProcess(
                ["--model", str(model), *SMALL_ENGINE, *_FLAGS],
                directory / f"replica-{number}.log",
                {FAULTS_VARIABLE: str(orders), "VLLM_CPU_OMP_THREADS_BIND": core},
            )
            stack.callback(daemon.kill)
            daemons.append(daemon.wait_serving(300.0))
        targets = {f"replica-{number}": _metrics(daemon.stderr) for number, daemon in enumerate(daemons)}
        log = directory / "router.log"
        address = stack.enter_context(_router([daemon.address for daemon in daemons], log))
        yield Fleet(address, {**targets, ROUTER: _metrics(log.read_text())}, faults)


@contextmanager
def _router(replicas: list[str], log: Path) -> Iterator[str]:
    flags = ["--port", "0", "--metrics-port", "0", *(flag for each in replicas for flag in ("--replica", each))]
    command = [sys.executable, "-m", "genserve", "route", *flags]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, process_group=0)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " on " not in line:
            raise RuntimeError(f"the router has ended: {log.read_text()[-2000:]}")
        yield line.rsplit(" on ", 1)[1].strip()
    finally:
        process.terminate()
        process.wait(_STOP_TIMEOUT_S)


def _metrics(log: str) -> str:
    found = _METRICS.search(log)
    if found is None:
        raise RuntimeError(f"no line says where the series are: {log[-2000:]}")
    return found[1]
