"""Which replica gets which cores, where engines run on the CPU. Pure: the cores are given.

vLLM binds the threads of an engine to the cores of the first memory node, one thread to each core that the process may
run on. Several engines would all be bound to the same cores, and wait for each other while other cores are idle.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise


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
