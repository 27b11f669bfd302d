"""A router whose process stands still has not listened meanwhile: no replica is lost by that."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.fleet.routers import QUICK, routed
from tests.support.patience import until

SILENCE_S = 2.0
STANDSTILL_S = 2.5  # longer than gRPC would wait for the answer, if it were told the same


@pytest.mark.parametrize(("service", "call"), [("control", "GetStatus"), ("weights", "GetWeights")])
async def test_a_standstill_during_a_call_of_the_watch_loses_no_replica(
    service: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer cannot be taken before its deadline has passed."""
    async with routed(1, replace(QUICK, silence_s=SILENCE_S)) as fleet:
        (upstream,) = fleet.running.router.fleet.upstreams.values()
        stub = getattr(upstream, service)
        real, calling, num_losses = getattr(stub, call), asyncio.Event(), upstream.member.num_losses

        def stand_still(*args: Any, **options: Any) -> Any:
            monkeypatch.undo()
            answer = real(*args, **options)
            asyncio.get_running_loop().call_soon(time.sleep, STANDSTILL_S)
            calling.set()
            return answer

        monkeypatch.setattr(stub, call, stand_still)
        fleet.running.router.fleet.doubt(upstream)  # what it serves is asked at the next report
        await until(calling.is_set)
        await fleet.until_ready()
        await fleet.until_reported()
        assert upstream.member.num_losses == num_losses, upstream.member.failure
