"""Whether vLLM counts its own series."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter, StatLoggerManager

from genserve.engine.vllm.clients.rows import ClientRows
from genserve.engine.vllm.start.series import BoundedSeries, NoSeries, stat_loggers


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
    assert row.num_recent_tokens() == 3


@pytest.mark.parametrize(("with_series", "kind"), [(True, BoundedSeries), (False, NoSeries)])
def test_the_logger_is_the_one_that_was_asked_for(with_series: bool, kind: type) -> None:
    """vLLM takes the class, and makes one of all engines."""
    assert stat_loggers("row", with_series=with_series) == ["row", kind]
