"""`genserve top` on a router."""

import time

import pytest

from genserve.cli.top.app import TopApp
from genserve.cli.top.feed import Pace
from genserve.cli.top.frame import frame
from genserve.cli.top.lines import plain
from genserve.cli.top.screen import Screen
from genserve.weights.push.types import PushHeader
from tests.fleet.routers import routed
from tests.support.patience import until
from tests.support.pulled_peers import CHECKPOINT


@pytest.mark.slow
async def test_every_replica_is_shown_and_one_can_be_drained() -> None:
    """With its version, its lag and its part of a push; nothing is drained before it is confirmed."""
    async with routed(2) as fleet:
        first, second = (daemon.address for daemon in fleet.daemons)
        app = TopApp(fleet.client, Screen(fleet.running.address, time.monotonic()), Pace(0.1))

        def row(address: str) -> str:
            """What is shown of a replica."""
            lines = plain(frame(app.state, 80, 24, time.monotonic())).split("\n")
            return next((line for line in lines if line[1:].startswith(address)), "")

        async with app.run_test(size=(80, 24)) as pilot:
            await until(lambda: " ready " in row(first) and " ready " in row(second))
            assert app.state.is_router and row(first).startswith(">")
            stream = await fleet.daemons[1].registry.open(PushHeader("p", 1, manifest=CHECKPOINT.as_manifest()))
            stream.write(0, bytes(CHECKPOINT.as_manifest().total_bytes // 2 + 1), None)
            await until(lambda: "receiving 50%" in row(second))
            assert "receiving" not in row(first)
            stream.detach()
            await pilot.press("down", "d", "n")
            assert " ready " in row(second)
            await pilot.press("d", "y")
            await until(lambda: not row(second))
            assert row(first).startswith(">")
            await until(lambda: "it is removed" in plain(frame(app.state, 80, 24, time.monotonic())))
