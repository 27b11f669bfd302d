"""The series of a router."""

import asyncio

import pytest

from genserve.errors import PushRolledBackError
from tests.fleet.routers import routed
from tests.support.documented_series import differences
from tests.support.promql import faults, is_of_router, queries
from tests.support.pulled_peers import weights
from tests.support.scraped import scrape, scraped_until


async def test_a_router_shows_its_replicas_its_version_and_its_pushes() -> None:
    """All together: the address of a replica is no label, since callers add replicas."""
    async with routed(2, metrics_port=0) as fleet:
        url = fleet.running.metrics_url
        before = await scraped_until(url, lambda found: found.value("genserve_router_replicas", state="ready") == 2)
        assert before.value("genserve_router_weight_version") == 0
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        after = await scraped_until(url, lambda found: found.value("genserve_router_pushes_total", outcome="OK") == 1)
        assert after.value("genserve_router_weight_version") == 1
        assert after.value("genserve_router_lag_versions") == after.value("genserve_router_replicas_behind") == 0
        assert after.value("grpc_server_handled_total", grpc_method="PushWeights", grpc_code="OK") >= 1
        assert all(daemon.address not in after.text for daemon in fleet.daemons)


async def test_a_router_says_where_its_series_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody could know a port that was free otherwise."""
    async with routed(1, metrics_port=0) as fleet:
        assert fleet.running.metrics_url in capsys.readouterr().err


async def test_a_push_that_fails_counts_by_its_reason() -> None:
    """What its trainer was told. The series is there before, or `increase` would not see the first failure."""
    async with routed(1, metrics_port=0) as fleet:
        before = await asyncio.to_thread(scrape, fleet.running.metrics_url)
        assert before.samples["genserve_router_pushes_total", frozenset({("outcome", "PUSH_ROLLED_BACK")})] == 0
        fleet.daemons[0].engine.fails["prepare_weights"] = PushRolledBackError("out of memory")
        with pytest.raises(PushRolledBackError):
            await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        labels = {"outcome": "PUSH_ROLLED_BACK"}
        await scraped_until(
            fleet.running.metrics_url, lambda found: found.value("genserve_router_pushes_total", **labels) == 1
        )


async def test_the_page_and_the_queries_name_what_a_router_shows() -> None:
    """After a push, so that every series has samples."""
    async with routed(1, metrics_port=0) as fleet:
        await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        found = await scraped_until(
            fleet.running.metrics_url, lambda found: found.value("genserve_router_pushes_total", outcome="OK") == 1
        )
        assert differences(found, "genserve_router_") == {}
        asked = {where: query for where, query in queries().items() if is_of_router(query)}
        assert asked
        assert {where: faults(query, found) for where, query in asked.items()} == {where: [] for where in asked}
