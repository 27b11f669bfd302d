"""What the flags about Ray may say, and the task that is handed to another process."""

import pytest

from genserve.placement.ray.settings import RayConfig, RayFleet, Task, actor_name, namespace_of, replica_number


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"address": "ray://head:10001"}, "ray://head:10001"),
        ({"address": "local"}, "--ray .*HOST:PORT.*'local'"),
        ({"address": ""}, "--ray .*HOST:PORT.*''"),
        ({"address": "head"}, "--ray .*HOST:PORT.*'head'"),
        ({"name": ""}, "--ray-name "),
        ({"name": "a/b"}, "--ray-name "),
        ({"name": "a" * 65}, "--ray-name "),
        ({"timeout_s": 0.0}, "--ray-timeout "),
        ({"timeout_s": float("nan")}, "--ray-timeout "),
        ({"timeout_s": 1e6}, "--ray-timeout "),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], says: str) -> None:
    """By the flag that says it."""
    with pytest.raises(ValueError, match=says):
        RayConfig(**settings)  # type: ignore[arg-type]


def test_people_are_told_where_the_cluster_is() -> None:
    """As far as the user has said it."""
    assert [RayConfig().where, RayConfig("head:6379").where] == ["Ray", "Ray at head:6379"]


def test_a_task_is_the_same_in_the_other_process() -> None:
    """With every field of its own, and without a fleet too."""
    config = RayConfig("head:6379", "second", 7.5)
    fleet = RayFleet(3, ["--model", "m"], cpus=2, gpus=4, is_open=True, start_timeout_s=60.0, stop_timeout_s=9.5)
    assert Task.from_json(Task(config, fleet).to_json()) == Task(config, fleet)
    assert Task.from_json(Task(config).to_json()) == Task(config)


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
