"""Names by which replicas are found."""

import pytest

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
