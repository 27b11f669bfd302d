"""Where other hosts reach the daemon, by vLLM's flags and ours."""

from types import SimpleNamespace
from typing import Any

import pytest

from genserve.engine.vllm.start import other_hosts
from genserve.engine.vllm.start.failure import EngineStartError

FIRST = "10.0.0.1"


def parallel(**fields: Any) -> SimpleNamespace:
    """vLLM's ParallelConfig for one host, but for these fields."""
    alone = {
        "nnodes": 1,
        "master_addr": "127.0.0.1",
        "data_parallel_size": 1,
        "data_parallel_size_local": 1,
        "data_parallel_master_ip": "127.0.0.1",
        "use_ray": False,
    }
    return SimpleNamespace(**{**alone, **fields})


def daemon_address(parallel: SimpleNamespace, host: str, port: int) -> str:
    """On a host whose address is 10.0.0.5."""
    return other_hosts.daemon_address(parallel, host, port, lambda: "10.0.0.5")


NODES = parallel(nnodes=2, master_addr=FIRST)
ENGINES = parallel(data_parallel_size=4, data_parallel_size_local=2, data_parallel_master_ip=FIRST)


@pytest.mark.parametrize(
    "alone",
    [
        parallel(),
        parallel(data_parallel_size=2, data_parallel_size_local=2),
        parallel(nnodes=2),  # two commands on one host
        parallel(data_parallel_size=2, data_parallel_size_local=1),
    ],
)
def test_one_host_needs_no_address(alone: SimpleNamespace) -> None:
    """Wherever the daemon listens."""
    assert daemon_address(alone, "127.0.0.1", 0) == ""
    assert daemon_address(alone, "127.0.0.1", -1) == ""


@pytest.mark.parametrize("spread", [NODES, ENGINES])
@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", f"{FIRST}:50051"),
        ("::", f"{FIRST}:50051"),
        ("10.0.0.9", "10.0.0.9:50051"),
        ("fd00::9", "[fd00::9]:50051"),
        ("[fd00::9]", "[fd00::9]:50051"),
        ("trainer.example", "trainer.example:50051"),
    ],
)
def test_the_address_is_the_one_that_is_listened_on(spread: SimpleNamespace, host: str, address: str) -> None:
    """Or, where that is every one, the one under which hosts find each other."""
    assert daemon_address(spread, host, 50051) == address


def test_an_ipv6_address_of_the_first_host() -> None:
    """In brackets, as gRPC takes it."""
    assert daemon_address(parallel(nnodes=2, master_addr="fd00::1"), "::", 50051) == "[fd00::1]:50051"


@pytest.mark.parametrize("spread", [NODES, ENGINES])
@pytest.mark.parametrize(
    ("host", "port", "flag"), [("127.0.0.1", 50051, "--host"), ("0.0.0.0", 0, "--port"), ("0.0.0.0", -1, "--port")]
)
def test_an_address_that_nobody_elsewhere_reaches_is_refused(
    spread: SimpleNamespace, host: str, port: int, flag: str
) -> None:
    """By its flag."""
    with pytest.raises(EngineStartError, match=f"^{flag} "):
        daemon_address(spread, host, port)


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("0.0.0.0", 50051, "10.0.0.5:50051"),
        ("10.0.0.9", 50051, "10.0.0.9:50051"),
        ("127.0.0.1", 50051, ""),
        ("::", 0, ""),
    ],
)
def test_ray_tells_nobody_where_its_workers_will_be(host: str, port: int, address: str) -> None:
    """So nothing is refused before they say where they are."""
    assert daemon_address(parallel(use_ray=True), host, port) == address
