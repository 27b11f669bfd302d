"""What each replica on this host gets: the environment and the CPUs of its process."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from genserve.placement import machine
from genserve.placement.cores import core_shares
from genserve.placement.gpus import VISIBLE, gpu_shares, ranks_per_replica, visible_gpus

_BINDS: Final = "VLLM_CPU_OMP_THREADS_BIND"
_NODES: Final = "CPU_VISIBLE_MEMORY_NODES"


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
    shares = gpu_shares(visible_gpus(os.environ, machine.num_gpus()), num_replicas, needed)
    return [
        ProcessShare({VISIBLE: ",".join(each)}, words=f"GPU{'s' if needed > 1 else ''} {', '.join(each)}")
        for each in shares
    ]


def gpus_each(flags: Sequence[str], num_gpus_each: int | None) -> int:
    """The number of GPUs that an engine with these flags needs; 0 if the one that is installed runs on the CPU.
    `num_gpus_each`: what the user says. Raises ValueError if it is not known, or cannot be had."""
    num_ranks = ranks_per_replica(flags)
    if machine.is_cpu_engine():
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
    shares = core_shares(machine.cores(), num_replicas, machine.memory_nodes())
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
