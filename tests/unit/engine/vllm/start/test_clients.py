"""How many clients an engine has, which of them is the daemon, and whether they count vLLM's own series."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter, StatLoggerManager

from genserve.engine.vllm.clients.rows import ClientRows
from genserve.engine.vllm.start.clients import ALONE, OPENAI, BoundedSeries, Clients, NoSeries, possible, stat_loggers
from genserve.engine.vllm.start.failure import EngineStartError


def test_the_daemon_is_always_one_of_the_clients() -> None:
    """And the OpenAI server, if there is one."""
    assert (ALONE.count, Clients(2).count, Clients(2, with_openai=True).count) == (1, 3, 4)


def configured(**changes: object) -> Any:
    """A configuration with two data-parallel engines on this host."""
    parallel = {
        "data_parallel_size": 2,
        "data_parallel_size_local": 2,
        "local_engines_only": False,
        "data_parallel_backend": "mp",
    }
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**parallel, **changes}))


def test_front_ends_are_the_numbers_after_all_others() -> None:
    """The OpenAI server has another seat."""
    assert list(ALONE.frontends) == []
    assert list(Clients(2).frontends) == [1, 2]
    assert list(Clients(2, with_openai=True).frontends) == [2, 3]
    assert OPENAI not in Clients(2, with_openai=True).frontends


@pytest.mark.parametrize(
    "changes", [{"data_parallel_size_local": 1}, {"local_engines_only": True}, {"data_parallel_backend": "ray"}]
)
def test_requested_front_ends_that_miss_an_engine_are_refused(changes: Any) -> None:
    """A default that depends on the machine must not keep an engine from starting."""
    asked = Clients(2)
    assert possible(configured(), asked) == asked
    assert possible(configured(**changes), ALONE) == ALONE
    with pytest.raises(EngineStartError, match=r"^--frontends cannot be used"):
        possible(configured(**changes), asked)
    assert possible(configured(**changes), replace(asked, if_possible=True)) == ALONE


def test_an_openai_server_that_cannot_reach_every_engine_is_refused() -> None:
    """It was asked for, even if the front ends beside it were not."""
    asked = Clients(1, with_openai=True, if_possible=True)
    assert asked.with_openai and not ALONE.with_openai
    with pytest.raises(EngineStartError, match=r"^--openai-port cannot be used"):
        possible(configured(local_engines_only=True), asked)


def test_where_nothing_is_shown_only_the_row_is_told_the_statistics() -> None:
    """vLLM would add a logger of its own, which costs something at each step."""
    row = ClientRows.create(1, 1).row(0)
    config: Any = SimpleNamespace()
    manager = StatLoggerManager(config, None, stat_loggers(row, with_series=False), enable_default_loggers=False)
    adapter, none = manager.stat_loggers
    assert isinstance(adapter, PerEngineStatLoggerAdapter)
    assert isinstance(none, NoSeries)
    manager.log_engine_initialized()
    manager.record(None, SimpleNamespace(num_generation_tokens=3, inter_token_latencies_iter=[]))  # type: ignore[arg-type]
    manager.record_sleep_state(1, 1)
    manager.record_admission_rejection("max_num_queued_reqs")
    assert row.stats().num_recent_tokens == 3


@pytest.mark.parametrize(("with_series", "kind"), [(True, BoundedSeries), (False, NoSeries)])
def test_the_logger_is_the_one_that_was_asked_for(with_series: bool, kind: type) -> None:
    """vLLM takes the class, and makes one of all engines."""
    assert stat_loggers("row", with_series=with_series) == ["row", kind]
