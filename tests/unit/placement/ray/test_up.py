"""What `genserve up --ray` asks Ray for, from its flags."""

import importlib.util
from typing import Any

import pytest

from genserve.fleet.config import RouteConfig
from genserve.placement import shares
from genserve.placement.config import UpConfig
from genserve.placement.ray.up import fleet_of


@pytest.mark.parametrize(
    ("flags", "gpus_each", "is_cpu", "cpus", "gpus"),
    [
        (["-tp", "2", "-pp=2"], None, False, 4, 4),
        (["--config", "x.yaml"], 3, False, 3, 3),
        ([], None, True, 1, 0),
        (["-tp", "2"], None, True, 2, 0),
        (["--config", "x.yaml"], None, True, 1, 0),
    ],
)
def test_a_replica_asks_for_a_cpu_and_a_gpu_for_each_worker(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], gpus_each: int | None, is_cpu: bool, cpus: int, gpus: int
) -> None:
    """As many GPUs as on one host."""
    monkeypatch.setattr(shares, "is_cpu_engine", lambda: is_cpu)
    fleet = fleet_of(UpConfig(2, flags, gpus_each))
    assert (fleet.cpus, fleet.gpus, fleet.num_replicas) == (cpus, gpus, 2)


def test_without_an_engine_here_the_gpus_must_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could tell a cluster of GPUs from one without."""
    real = importlib.util.find_spec

    def find(name: str) -> Any:
        return None if name == "vllm" else real(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    with pytest.raises(ValueError, match="--gpus-per-replica"):
        fleet_of(UpConfig(1, []))
    assert fleet_of(UpConfig(1, [], 2)).gpus == 2


@pytest.mark.parametrize("is_open", [False, True])
def test_daemons_listen_as_openly_as_the_user_has_allowed(is_open: bool) -> None:
    """They drain as long as the router, and have as much time to end as on one host."""
    route = RouteConfig(allow_insecure=is_open, drain_timeout_s=5.0, write_timeout_s=9.0)
    fleet = fleet_of(UpConfig(1, ["--seed", "1"], None, route))
    assert fleet.is_open is is_open
    times = ["--drain-timeout=5.0", "--write-timeout=9.0"]
    assert fleet.flags == [*(["--allow-insecure"] if is_open else []), *times, "--seed", "1"]
    assert fleet.stop_timeout_s == 35.0
