"""The cores of each replica."""

import pytest

from genserve.placement.cores import Core, CoreShare, core_shares


def machine(*cores_of_nodes: int, threads: int = 1) -> list[Core]:
    """So many cores on each node; the second CPUs of all cores come after the first ones, as Linux counts."""
    nodes = [node for node, count in enumerate(cores_of_nodes) for _ in range(count)]
    total = len(nodes)
    return [Core(node, tuple(range(i, total * threads, total))) for i, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("cores", "num_replicas", "expected"),
    [
        (machine(2), 2, [({0}, 0), ({1}, 0)]),
        (machine(5), 2, [({0, 1}, 0), ({2, 3, 4}, 0)]),
        (machine(2, threads=2), 2, [({0, 2}, 0), ({1, 3}, 0)]),
        (machine(2, 2), 2, [({0, 1}, 0), ({2, 3}, 1)]),
        (machine(2, 2), 3, [({0}, 0), ({1}, 0), ({2, 3}, 1)]),
        (machine(1, 1, 1, 1), 2, [({0}, 0), ({2}, 2)]),
        (machine(0, 2), 2, [({0}, 1), ({1}, 1)]),
    ],
)
def test_each_replica_has_whole_cores_of_one_node(
    cores: list[Core], num_replicas: int, expected: list[tuple[set[int], int]]
) -> None:
    """vLLM binds the threads of an engine to the cores of one memory node."""
    shares = core_shares(cores, num_replicas, {core.node for core in cores})
    assert shares == [CoreShare(frozenset(cpus), node) for cpus, node in expected]


def test_memory_without_cores_gets_no_replica() -> None:
    """Such as that of a device."""
    assert core_shares(machine(2), 2, [0, 1]) == [CoreShare(frozenset({cpu}), 0) for cpu in (0, 1)]


@pytest.mark.parametrize(
    ("cores", "num_replicas", "memory_nodes"),
    [(machine(2), 3, [0]), (machine(3, 1), 4, [0, 1]), (machine(2, 2), 2, [0]), ([], 1, [0])],
)
def test_nothing_is_shared_out_where_it_does_not_come_out(
    cores: list[Core], num_replicas: int, memory_nodes: list[int]
) -> None:
    """Fewer cores than replicas, on one node or on all, or cores whose memory cannot be used."""
    assert core_shares(cores, num_replicas, memory_nodes) is None
