"""The series of a real daemon with a front end, before and after requests and a push: one engine for all tests."""

import inspect
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from genserve.client import AsyncClient, Generation
from genserve.weights.push.outcomes import STEPS
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.documented_series import differences
from tests.support.promql import faults, is_of_router, queries
from tests.support.scraped import scrape, scraped_until

_GENERATE = {"grpc_service": "genserve.v1.GenerationService", "grpc_method": "Generate", "grpc_type": "server_stream"}


@pytest.fixture(scope="module")
def measured(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon with a front end."""
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--frontends", "1", "--metrics-port", "0"]
    process = DaemonProcess(flags, tmp_path_factory.mktemp("metrics") / "stderr")
    try:
        yield process.wait_serving()
    finally:
        process.end()


def url_of(daemon: DaemonProcess) -> str:
    """Where its series are, as it has said."""
    (found,) = re.findall(r"^genserve: metrics: (http://127\.0\.0\.1:\d+/metrics)$", daemon.stderr, re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def url(measured: DaemonProcess) -> str:
    """Of the daemon of all tests."""
    return url_of(measured)


@pytest.fixture(scope="module")
async def client(measured: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client that knows the front end."""
    async with AsyncClient(measured.address) as connected:
        await connected.wait_ready()
        yield connected


def test_first_step_of_an_idle_daemon_is_not_counted(measured: DaemonProcess, url: str) -> None:
    """It is taken before the daemon serves. The first test of this daemon."""
    counted = ("generation_tokens", "prompt_tokens", "request_success", "prefix_cache_queries", "prefix_cache_hits")
    found = scrape(url)
    assert {name for name, _ in found.samples} >= {f"vllm:{name}_total" for name in counted}
    assert {name: found.value(f"vllm:{name}_total") for name in counted} == dict.fromkeys(counted, 0)
    assert found.value("genserve_served_tokens_total") == 0
    assert found.value("vllm:e2e_request_latency_seconds_count") == 0


async def test_requests_of_the_daemon_and_of_its_front_end_are_counted_together(client: AsyncClient, url: str) -> None:
    """The first call goes to the daemon, which names the front end to the client; the next ones go there."""
    before = scrape(url)
    for _ in range(3):
        await client.generate("hello", max_tokens=4, ignore_eos=True)

    def counted(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    after = await scraped_until(
        url,
        lambda found: (
            found.value("grpc_server_handled_total", **_GENERATE)
            >= before.value("grpc_server_handled_total", **_GENERATE) + 3
        ),
    )
    assert counted("grpc_server_started_total", **_GENERATE) == 3
    assert counted("grpc_server_handled_total", grpc_code="OK", **_GENERATE) == 3
    assert counted("vllm:generation_tokens_total") == counted("genserve_served_tokens_total") == 12
    assert counted("vllm:request_success_total", finished_reason="length") == 3
    assert after.value("genserve_event_loop_lag_seconds_count", process="frontend") > 0
    assert after.value("genserve_frontends", state="serving") == 1


async def test_a_push_is_counted_and_old_tokens_are_told_from_new_ones(
    client: AsyncClient, checkpoints: dict[str, Path], url: str
) -> None:
    """A request that runs through the push has tokens of two versions."""
    before = scrape(url)
    generation, is_aborted = Generation(), False
    stream = client.stream("hello", request_id="through", max_tokens=1900, ignore_eos=True)
    generation.add(await anext(stream))
    await client.push_weights(checkpoints["b"], version=1)
    async for delta in stream:
        generation.add(delta)
        if not is_aborted and generation.sequences[0].weight_spans[-1].version == 1:
            is_aborted = True
            await client.abort(["through"])
    after = await scraped_until(url, lambda found: found.value("genserve_served_tokens_total", versions_behind="1") > 0)
    behind = after.value("genserve_served_tokens_total", versions_behind="1")
    current = after.value("genserve_served_tokens_total", versions_behind="0")
    assert behind + current - before.value("genserve_served_tokens_total") == len(generation.token_ids)
    assert after.value("genserve_weight_version") == 1
    assert after.value("genserve_pushes_total", kind="weights", outcome="APPLIED") == 1
    assert after.value("genserve_push_received_bytes_total") > 0
    for step in STEPS:
        assert after.value("genserve_push_step_seconds_count", step=step) == 1
    assert 0 <= after.value("genserve_heartbeat_age_seconds") < 60


def test_the_page_names_every_series_with_its_labels(url: str) -> None:
    """And none that is not there, apart from those of a router, and of a process without front ends."""
    for prefix in ("genserve_", "grpc_", "vllm:", "process_", "python_info"):
        found = differences(scrape(url), prefix)
        assert {name: why for name, why in found.items() if not name.startswith("genserve_router_")} == {}


@pytest.mark.parametrize(("where", "query"), [each for each in queries().items() if not is_of_router(each[1])])
def test_a_query_asks_for_what_a_daemon_shows(where: str, query: str, url: str) -> None:
    """Series, labels, and values of labels, of the dashboard and of the alerts."""
    assert faults(query, scrape(url)) == []


def test_vllm_still_adds_no_series_where_there_is_a_logger_of_its_class() -> None:
    """engine.vllm.start.clients replaces it, so that nothing is counted where nothing is shown; and leaves out the
    names of adapters."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager

    assert "isinstance(global_stat_logger, PrometheusStatLogger)" in inspect.getsource(StatLoggerManager.__init__)
    assert "if self.gauge_lora_info is not None:" in inspect.getsource(PrometheusStatLogger.record)


async def test_with_disable_log_stats_vllm_counts_nothing(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The flag is vLLM's, and means what it means there. Our own series do not need it."""
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--metrics-port", "0", "--disable-log-stats"]
    process = DaemonProcess(flags, tmp_path / "stderr")
    try:
        url = url_of(process.wait_serving())
        async with AsyncClient(process.address) as client:
            await client.generate("hello", max_tokens=4, ignore_eos=True)
            after = await scraped_until(url, lambda found: found.value("genserve_served_tokens_total") == 4)
            assert "vllm:" not in after.text
            assert differences(after, "python_") == {}
            assert (await client.status()).load.tokens_per_second > 0
    finally:
        process.end()
