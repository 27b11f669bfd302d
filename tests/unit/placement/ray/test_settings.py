"""What the flags about Ray may say, and the task that is handed to another process."""

import pytest

from genserve.placement.ray.settings import RayConfig, RayFleet, Task


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
