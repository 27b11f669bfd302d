"""The GPUs of each replica."""

import pytest

from genserve.placement.gpus import gpu_shares, ranks_per_replica, visible_gpus


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
