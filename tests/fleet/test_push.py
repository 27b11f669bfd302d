"""One push for all replicas."""

import pytest

from tests.fleet.routers import routed
from tests.rpc.peers import content, weights


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
async def test_a_push_is_applied_on_all_replicas(num_replicas: int) -> None:
    """And all have its bytes."""
    async with routed(num_replicas) as fleet:
        result = await fleet.client.push_weights(weights(1), version=1, timeout_s=30)
        assert result.push.state == "applied"
        assert result.applied is not None and result.applied.active_version == 1
        assert result.state.weight_version == 1
        for daemon in fleet.daemons:
            assert daemon.engine.weight_version == 1
            assert daemon.engine.live == content(1)
        await fleet.until_ready()
