"""What a replica asks Ray for, what a cluster has, and what its daemon's environment gets from that of `up`. Pure: the
nodes are given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from genserve.net import is_loopback

_PREFIXES: Final = ("VLLM_", "HF_", "HUGGING_FACE_", "TRANSFORMERS_", "NCCL_", "GENSERVE_")
"""As vLLM carries them to its own workers on Ray: settings of the engine and of the hub, and tokens."""
_OTHERS: Final = ("PYTHONHASHSEED", "OMP_NUM_THREADS")
_OF_ONE_HOST: Final = frozenset({"VLLM_HOST_IP", "VLLM_LOOPBACK_IP", "VLLM_PORT", "VLLM_DP_MASTER_IP"})


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is alive, with the resources that it has when nothing runs."""

    id: str
    address: str
    cpus: float
    gpus: float

    @classmethod
    def of(cls, node: Mapping[str, Any]) -> "Node":
        """As `ray.nodes()` describes it."""
        has = node["Resources"]
        return cls(node["NodeID"], node["NodeManagerAddress"], has.get("CPU", 0.0), has.get("GPU", 0.0))

    def room(self, cpus: int, gpus: int) -> int:
        """How many replicas fit."""
        by_cpus = int(self.cpus // cpus)
        return by_cpus if gpus == 0 else min(by_cpus, int(self.gpus // gpus))


def bundle(cpus: int, gpus: int) -> dict[str, float]:
    """The resources of one replica, which Ray takes from one node."""
    return {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}


def not_placed(num_replicas: int, asked: Mapping[str, float], nodes: Sequence[Node], free: Mapping[str, float]) -> str:
    """Says what is needed and what the cluster has. `free`: what nothing uses, of all nodes together."""
    cpus, gpus = int(asked["CPU"]), int(asked.get("GPU", 0))
    room = sum(node.room(cpus, gpus) for node in nodes)
    each = "; ".join(f"{node.address} has {_amount(node.cpus, node.gpus)}" for node in nodes)
    amount = _amount(cpus, gpus)
    needed = (
        f"1 replica needs {amount} on one node"
        if num_replicas == 1
        else f"each of {num_replicas} replicas needs {amount} on one node"
    )
    return (
        f"{needed}; the cluster has room for {room} when nothing else runs ({each or 'it has no node'}), and "
        f"{_amount(free.get('CPU', 0.0), free.get('GPU', 0.0))} free"
    )


def reachable_by_others(nodes: Sequence[Node]) -> list[str]:
    """The addresses of nodes that are not of this host alone."""
    return sorted({node.address for node in nodes if not is_loopback(node.address)})


def place_on_node(number: int, node_of: Mapping[int, str]) -> tuple[int, int]:
    """Which of the replicas on its node a replica is, and how many they are. `node_of`: by the replica's number."""
    here = sorted(each for each, node in node_of.items() if node == node_of[number])
    return here.index(number), len(here)


def _amount(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU{'s' if cpus != 1 else ''} and {gpus:g} GPU{'s' if gpus != 1 else ''}"


def carried(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables that are the same on each node; others are those of the node."""
    return {
        name: value
        for name, value in environ.items()
        if (name.startswith(_PREFIXES) or name in _OTHERS) and name not in _OF_ONE_HOST
    }
