"""What each replica of a host gets, of which machine."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from genserve.placement import shares
from genserve.placement import shares as machine
from genserve.placement.shares import (
    Core,
    CoreShare,
    ProcessShare,
    core_shares,
    gpu_shares,
    process_shares,
    ranks_per_replica,
    visible_gpus,
)


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


Makes = Callable[..., None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Makes:
    """Makes this machine another one."""
    for name in ("CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND", "CPU_VISIBLE_MEMORY_NODES"):
        monkeypatch.delenv(name, raising=False)

    def on(num_gpus: int | None = None, num_cores: int = 4) -> None:
        monkeypatch.setattr(shares, "is_cpu_engine", lambda: num_gpus is None)
        monkeypatch.setattr(shares, "num_gpus", lambda: num_gpus)
        monkeypatch.setattr(shares, "cores", lambda: [Core(0, (i,)) for i in range(num_cores)])
        monkeypatch.setattr(shares, "memory_nodes", lambda: [0])

    return on


def test_replicas_on_gpus_get_theirs_by_the_environment(on: Makes) -> None:
    """And no cores: vLLM binds no threads there."""
    on(num_gpus=4)
    assert process_shares(["-tp", "2"], 2, None) == [
        ProcessShare({"CUDA_VISIBLE_DEVICES": "0,1"}, None, "GPUs 0, 1"),
        ProcessShare({"CUDA_VISIBLE_DEVICES": "2,3"}, None, "GPUs 2, 3"),
    ]
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in process_shares([], 2, None)] == ["0", "1"]


def test_the_number_of_gpus_may_be_said(on: Makes) -> None:
    """Where a file has the engine's flags it must be."""
    on(num_gpus=4)
    assert [each.words for each in process_shares(["--config", "x.yaml"], 2, 2)] == ["GPUs 0, 1", "GPUs 2, 3"]
    with pytest.raises(ValueError, match=r"--config: .*--gpus-per-replica"):
        process_shares(["--config", "x.yaml"], 2, None)
    with pytest.raises(ValueError, match=r"6 GPUs.* 4 "):
        process_shares([], 2, 3)


def test_replicas_on_the_cpu_get_their_cores(on: Makes) -> None:
    """With the memory node of these cores, which is where vLLM looks for them."""
    on()
    assert process_shares([], 2, None) == [
        ProcessShare({"CPU_VISIBLE_MEMORY_NODES": "0"}, frozenset({0, 1}), "CPUs 0-1"),
        ProcessShare({"CPU_VISIBLE_MEMORY_NODES": "0"}, frozenset({2, 3}), "CPUs 2-3"),
    ]


@pytest.mark.parametrize(
    ("flags", "num_replicas", "variable"),
    [
        ([], 1, ""),
        ([], 5, ""),
        (["-tp", "2"], 2, ""),
        (["--config", "x.yaml"], 2, ""),
        ([], 2, "VLLM_CPU_OMP_THREADS_BIND"),
        ([], 2, "CPU_VISIBLE_MEMORY_NODES"),
    ],
)
def test_cores_are_left_as_they_are_where_vllm_or_the_user_knows_better(
    on: Makes, monkeypatch: pytest.MonkeyPatch, flags: list[str], num_replicas: int, variable: str
) -> None:
    """One replica, too many, several ranks, or threads that the user binds."""
    on()
    if variable:
        monkeypatch.setenv(variable, "0")
    assert process_shares(flags, num_replicas, None) == [ProcessShare()] * num_replicas


@pytest.mark.parametrize(("flags", "gpus_each"), [(["--nnodes=2"], None), ([], 1)])
def test_what_a_cpu_cannot_have_is_refused(on: Makes, flags: list[str], gpus_each: int | None) -> None:
    """GPUs, and other hosts as everywhere."""
    on()
    with pytest.raises(ValueError, match=r"^--"):
        process_shares(flags, 2, gpus_each)


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ([], 1),
        (["--model", "m", "-tp", "2"], 2),
        (["--tensor-parallel-size=4", "--pipeline-parallel-size", "2"], 8),
        (["--tensor_parallel_size=4", "--data_parallel_size", "3"], 12),
        (["-tp=2", "-pp=2", "-dp=2", "-pcp=2"], 16),
        (["--tensor-par", "2", "--enable-expert-parallel", "-dcp", "2"], 2),
        (["--data-parallel-backend", "mp", "--max-model-len", "-1"], 1),
        (["--config", "x.yaml", "-tp", "2"], None),
    ],
)
def test_an_engine_needs_a_gpu_for_each_rank(flags: list[str], count: int | None) -> None:
    """In all the ways in which vLLM takes these flags; a file may say anything."""
    assert ranks_per_replica(flags) == count


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--nnodes", "2"], "--nnodes: "),
        (["-r", "1"], "--node-rank: "),
        (["--data_parallel_size_local", "1"], "--data-parallel-size-local: "),
        (["-dpr=1"], "--data-parallel-start-rank: "),
        (["--data-parallel-rank=1"], "--data-parallel-rank: "),
        (["--device-ids", "0,1"], "--device-ids: "),
        (["-tp", "two"], "'two'"),
        (["-tp", "0"], "--tensor-parallel-size "),
    ],
)
def test_flags_that_contradict_the_placement_are_refused(flags: list[str], says: str) -> None:
    """Before anything starts."""
    with pytest.raises(ValueError, match=says):
        ranks_per_replica(flags)


@pytest.mark.parametrize(
    ("named", "num_gpus", "devices"),
    [
        (None, 3, ["0", "1", "2"]),
        (None, 0, []),
        ("2,0", 8, ["2", "0"]),
        (" 1 , 3", None, ["1", "3"]),
        ("GPU-8932f937,MIG-1", None, ["GPU-8932f937", "MIG-1"]),
        ("0,-1,1", 8, ["0"]),
        ("", 8, []),
        ("0,0", 1, ["0", "0"]),
    ],
)
def test_replicas_use_the_gpus_that_the_environment_names(
    named: str | None, num_gpus: int | None, devices: list[str]
) -> None:
    """As CUDA reads it, whatever the driver has; all of the driver's otherwise."""
    assert visible_gpus({} if named is None else {"CUDA_VISIBLE_DEVICES": named}, num_gpus) == devices


def test_gpus_that_nobody_knows_are_an_error() -> None:
    """Every replica would take the first one."""
    with pytest.raises(ValueError, match="set CUDA_VISIBLE_DEVICES"):
        visible_gpus({}, None)


def test_each_replica_gets_neighbours() -> None:
    """And no GPU is in two shares; what is over is not used."""
    assert gpu_shares(["4", "5", "6", "7", "8"], 2, 2) == [["4", "5"], ["6", "7"]]
    assert gpu_shares(["4", "5", "6", "7"], 2, 2) == [["4", "5"], ["6", "7"]]


@pytest.mark.parametrize(
    ("devices", "says"),
    [
        (["0", "1", "2"], r"4 GPUs.* 3 .*\(0, 1, 2\)"),
        ([], r"4 GPUs.* 0 "),
    ],
)
def test_too_few_gpus_are_an_error(devices: list[str], says: str) -> None:
    """It says how many there are, and which."""
    with pytest.raises(ValueError, match=says):
        gpu_shares(devices, 2, 2)
    with pytest.raises(ValueError, match=r"6 GPUs.* 5 "):
        gpu_shares(list("01234"), 3, 2)
