"""What the flags about Ray may say, and the task that is handed to another process."""

import io
import os

import pytest

from genserve.errors import ReplicaNotFoundError
from genserve.placement.ray.settings import (
    RayConfig,
    RayFleet,
    ServingAddresses,
    Task,
    actor_name,
    addresses_of,
    namespace_of,
    replica_number,
)
from tests.support.refusals import refuses


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


async def test_every_change_is_a_line_with_all_addresses() -> None:
    """The reader needs none of the lines before."""
    lines = io.BytesIO()
    serving = ServingAddresses(lines)
    serving.put([])
    serving.add("b:1")
    serving.add("a:1")
    await serving.remove("b:1")
    told = [addresses_of(line) for line in lines.getvalue().splitlines()]
    assert told == [frozenset(), {"b:1"}, {"a:1", "b:1"}, {"a:1"}]
    with refuses(ReplicaNotFoundError, says="b:1"):
        await serving.remove("b:1")


def test_a_line_is_written_at_once() -> None:
    """However much its file gathers."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as lines, os.fdopen(reading, "rb", buffering=0) as read:
        ServingAddresses(lines).add("a:1")
        os.set_blocking(reading, False)
        assert addresses_of(read.read(100)) == {"a:1"}


def test_a_reader_that_is_gone_is_no_failure() -> None:
    """The process is told to end, and drains what it runs."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb", buffering=0) as lines:
        ServingAddresses(lines).add("a:1")
