"""What a replica asks Ray for, and what people are told of a cluster."""

import pytest

from genserve.placement.ray.resources import Node, bundle, carried, not_placed, place_on_node, reachable_by_others

NODES = [Node("a", "10.0.0.1", 8.0, 4.0), Node("b", "10.0.0.2", 1.0, 8.0)]


def test_a_node_has_what_ray_says_of_it() -> None:
    """A node without GPUs says nothing of them."""
    described = {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "memory": 1e9}}
    assert Node.of(described) == Node("a", "10.0.0.1", 8.0, 0.0)
    described["Resources"] = {"GPU": 4.0}
    assert Node.of(described) == Node("a", "10.0.0.1", 0.0, 4.0)


@pytest.mark.parametrize(
    ("node", "cpus", "gpus", "room"),
    [
        (NODES[0], 2, 2, 2),
        (NODES[0], 2, 0, 4),
        (NODES[0], 1, 3, 1),
        (NODES[0], 1, 5, 0),
        (NODES[1], 2, 2, 0),
        (NODES[1], 1, 1, 1),
    ],
)
def test_the_room_of_a_node_is_that_of_its_scarcest_resource(node: Node, cpus: int, gpus: int, room: int) -> None:
    """In whole replicas."""
    assert node.room(cpus, gpus) == room


def test_a_bundle_names_gpus_only_if_it_has_some() -> None:
    """Ray takes no resource of which there is 0."""
    assert bundle(2, 0) == {"CPU": 2.0}
    assert bundle(2, 1) == {"CPU": 2.0, "GPU": 1.0}


def test_too_few_resources_are_reported_with_what_is_there() -> None:
    """GPUs of two nodes together do not help a replica."""
    told = not_placed(2, bundle(1, 6), NODES, {"CPU": 3.0})
    for each in (
        "2 replicas needs 1 CPU and 6 GPUs",
        "room for 1 when",
        "10.0.0.1 has 8 CPUs and 4 GPUs; 10.0.0.2 has 1 CPU and 8 GPUs",
        "3 CPUs and 0 GPUs free",
    ):
        assert each in told
    assert "room for 9 when" in not_placed(10, bundle(1, 0), NODES, {})
    assert "room for 4 when" in not_placed(10, bundle(2, 0), NODES, {})
    assert not_placed(1, bundle(1, 0), NODES, {}).startswith("1 replica needs 1 CPU and 0 GPUs")
    assert "no node" in not_placed(1, bundle(1, 0), [], {})


def test_addresses_of_one_host_are_not_reachable_by_others() -> None:
    """Each address once."""
    assert reachable_by_others([*NODES, NODES[0], Node("c", "127.0.0.1", 1.0, 0.0)]) == ["10.0.0.1", "10.0.0.2"]


def test_replicas_on_one_node_are_counted_by_their_numbers() -> None:
    """So that each of them takes another share of its cores."""
    node_of = {0: "a", 1: "b", 2: "a", 3: "a"}
    assert [place_on_node(number, node_of) for number in range(4)] == [(0, 3), (0, 1), (1, 3), (2, 3)]


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
