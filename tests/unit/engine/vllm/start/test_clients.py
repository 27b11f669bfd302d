"""How many clients an engine has, and which of them is the daemon."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from genserve.engine.vllm.start.clients import ALONE, Clients, possible
from genserve.engine.vllm.start.failure import EngineStartError


def test_the_daemon_is_one_of_the_clients() -> None:
    """A number outside of them would leave the engine without an owner."""
    assert (ALONE.count, ALONE.daemon_index) == (1, 0)
    assert Clients(3, 2).daemon_index == 2
    for count, index in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(ValueError, match=f"one of {count} clients"):
            Clients(count, index)


def configured(**changes: object) -> Any:
    """A configuration with two data-parallel engines on this host."""
    parallel = {
        "data_parallel_size": 2,
        "data_parallel_size_local": 2,
        "local_engines_only": False,
        "data_parallel_backend": "mp",
    }
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**parallel, **changes}))


def test_front_ends_are_the_numbers_after_the_daemon() -> None:
    """A client before the daemon is somebody else."""
    assert list(ALONE.frontends) == []
    assert list(Clients(4, 1).frontends) == [2, 3]


@pytest.mark.parametrize(
    "changes", [{"data_parallel_size_local": 1}, {"local_engines_only": True}, {"data_parallel_backend": "ray"}]
)
def test_front_ends_that_cannot_reach_every_engine_are_refused_if_they_were_asked_for(changes: Any) -> None:
    """A default that depends on the machine must not keep an engine from starting."""
    asked = Clients(3)
    assert possible(configured(), asked) == asked
    assert possible(configured(**changes), ALONE) == ALONE
    with pytest.raises(EngineStartError, match=r"^--frontends cannot be used"):
        possible(configured(**changes), asked)
    assert possible(configured(**changes), replace(asked, if_possible=True)) == ALONE


def test_an_openai_server_that_cannot_reach_every_engine_is_refused() -> None:
    """It was asked for, even if the front ends beside it were not."""
    asked = Clients(3, 1, if_possible=True)
    assert asked.with_openai and not ALONE.with_openai
    with pytest.raises(EngineStartError, match=r"^--openai-port cannot be used"):
        possible(configured(local_engines_only=True), asked)
