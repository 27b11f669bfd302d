"""What the machine is read to have."""

import os
from pathlib import Path

import pytest

from genserve.placement import machine
from genserve.placement.machine import Core, CoreShare, core_shares


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8\n", [0, 1, 2, 3, 8]), ("5", [5]), ("\n", [])])
def test_lists_of_the_kernel_are_read(text: str, numbers: list[int]) -> None:
    """Of CPUs and of memory nodes."""
    assert machine.id_list(text) == numbers


def test_cores_are_those_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two cores with two CPUs each; CPU 7 is not allowed."""
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(f"{cpus}\n")
    for cpu in range(8):
        topology = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    assert machine.cores(tmp_path) == [Core(0, (0, 4)), Core(0, (1, 5)), Core(1, (2, 6)), Core(1, (3,))]


def test_a_system_without_a_topology_has_a_core_for_each_cpu(tmp_path: Path) -> None:
    """In a sandbox, for one."""
    assert machine.cores(tmp_path) == [Core(0, (cpu,)) for cpu in sorted(os.sched_getaffinity(0))]


def test_the_cores_of_this_machine_are_its_cpus() -> None:
    """Each in one core."""
    cpus = [cpu for core in machine.cores() for cpu in core.cpus]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))


def test_memory_nodes_are_those_that_this_process_may_use(tmp_path: Path) -> None:
    """As the kernel says."""
    (tmp_path / "status").write_text("Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t0-1\nThreads:\t1\n")
    assert machine.memory_nodes(tmp_path / "status") == [0, 1]
    assert machine.memory_nodes()


@pytest.mark.parametrize(
    ("target", "installed", "is_cpu"),
    [("", "0.32.0", False), ("", "0.32.0+cpu", True), ("", None, True), ("cpu", "0.32.0", True)],
)
def test_the_engine_that_is_installed_says_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, target: str, installed: str | None, is_cpu: bool
) -> None:
    """vLLM's own builds for the CPU have another name or version."""

    def version(name: str) -> str:
        assert name == "vllm"
        if installed is None:
            raise machine.PackageNotFoundError
        return installed

    monkeypatch.setenv("VLLM_TARGET_DEVICE", target)
    monkeypatch.setattr(machine, "version", version)
    assert machine.is_cpu_engine() is is_cpu


def on_nodes(*cores_of_nodes: int, threads: int = 1) -> list[Core]:
    """So many cores on each node; the second CPUs of all cores come after the first ones, as Linux counts."""
    nodes = [node for node, count in enumerate(cores_of_nodes) for _ in range(count)]
    total = len(nodes)
    return [Core(node, tuple(range(i, total * threads, total))) for i, node in enumerate(nodes)]


@pytest.mark.parametrize(
    ("cores", "num_replicas", "expected"),
    [
        (on_nodes(2), 2, [({0}, 0), ({1}, 0)]),
        (on_nodes(5), 2, [({0, 1}, 0), ({2, 3, 4}, 0)]),
        (on_nodes(2, threads=2), 2, [({0, 2}, 0), ({1, 3}, 0)]),
        (on_nodes(2, 2), 2, [({0, 1}, 0), ({2, 3}, 1)]),
        (on_nodes(2, 2), 3, [({0}, 0), ({1}, 0), ({2, 3}, 1)]),
        (on_nodes(1, 1, 1, 1), 2, [({0}, 0), ({2}, 2)]),
        (on_nodes(0, 2), 2, [({0}, 1), ({1}, 1)]),
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
    assert core_shares(on_nodes(2), 2, [0, 1]) == [CoreShare(frozenset({cpu}), 0) for cpu in (0, 1)]


@pytest.mark.parametrize(
    ("cores", "num_replicas", "memory_nodes"),
    [(on_nodes(2), 3, [0]), (on_nodes(3, 1), 4, [0, 1]), (on_nodes(2, 2), 2, [0]), ([], 1, [0])],
)
def test_nothing_is_shared_out_where_it_does_not_come_out(
    cores: list[Core], num_replicas: int, memory_nodes: list[int]
) -> None:
    """Fewer cores than replicas, on one node or on all, or cores whose memory cannot be used."""
    assert core_shares(cores, num_replicas, memory_nodes) is None
