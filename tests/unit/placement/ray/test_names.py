"""Names by which replicas are found, and which variables go with them."""

import pytest

from genserve.placement.ray.carried import carried
from genserve.placement.ray.names import actor_name, namespace_of, replica_number


@pytest.mark.parametrize("number", [0, 7, 1023])
def test_the_number_of_a_replica_is_in_the_name_of_its_actor(number: int) -> None:
    """And can be read back."""
    assert replica_number(actor_name(number)) == number


@pytest.mark.parametrize("name", ["", "replica-", "replica--1", "replica-1x", "replica-²", "trainer", "7"])
def test_other_actors_are_no_replicas(name: str) -> None:
    """Whoever makes actors in the namespace."""
    assert replica_number(name) is None


def test_fleets_have_namespaces_of_their_own() -> None:
    """Which no program has by accident."""
    assert namespace_of("a") != namespace_of("b")
    assert namespace_of("a").startswith("genserve-")


def test_settings_of_the_engine_and_of_the_hub_are_carried_to_other_nodes() -> None:
    """What is of one host, or of the system, is not."""
    environ = {
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_TOKEN": "x",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "VLLM_HOST_IP": "10.0.0.1",
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
        "RAY_ADDRESS": "auto",
    }
    assert sorted(carried(environ)) == ["HF_TOKEN", "NCCL_DEBUG", "OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL"]
    assert carried(environ)["OMP_NUM_THREADS"] == "4"
