"""A replica whose weights are older than the router takes them to be."""

import asyncio
from dataclasses import replace

import pytest

from genserve.client import AsyncClient
from tests.fleet.scripted_fleet import SETTINGS, scripted_fleet
from tests.fleet.talking_engine import let_talk
from tests.support.clocks import advanced_clock
from tests.support.patience import until


@pytest.mark.parametrize("many", [False, True], ids=["Generate", "GenerateMany"])
async def test_a_replica_that_lags_unnoticed_serves_nobody(*, many: bool) -> None:
    """It has restarted with its checkpoint between two reports. It is out until it has told what it serves."""
    settings = replace(SETTINGS, report_interval_s=10.0)
    async with scripted_fleet(2, settings, "round-robin", versions=(3, 3)) as router:
        for daemon in router.daemons:
            let_talk(daemon.engine, 3)
        router.daemons[0].engine.weight_version = 0
        async with AsyncClient(router.address) as client:
            if many:
                await client.generate_many([[1], [2], [3]], max_tokens=1, text=False)
            else:
                await asyncio.gather(*(client.generate([each], max_tokens=1, text=False) for each in (1, 2, 3)))
        assert router.num_submitted == [0, 3]
        assert len(router.fleet.ready) == 1
        router.daemons[0].engine.weight_version = 3
        with advanced_clock() as clock:
            await clock.advance(settings.heartbeat_s)
            await until(lambda: len(router.fleet.ready) == 2)
