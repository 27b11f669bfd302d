"""The pushes in flight, as a router tells of them."""

from genserve.weights.push.types import PushHeader
from tests.fleet.routers import routed
from tests.support.pulled_peers import CHECKPOINT


async def test_a_router_lists_the_pushes_of_its_replicas() -> None:
    """Each replica with its own; and in its own status each push once, as it is where most of it has arrived."""
    async with routed(2) as fleet:
        header = PushHeader("p", 1, manifest=CHECKPOINT.as_manifest())
        streams = [await daemon.registry.open(header) for daemon in fleet.daemons]
        streams[1].write(0, bytes(64), None)
        async with fleet.client.watch_status(interval_s=0.1) as watched:
            async for status in watched:
                if [push.received_bytes for push in status.pushes] == [64]:
                    break
        assert (status.pushes[0].push_id, status.pushes[0].state) == ("p", "receiving")
        assert status.time is not None
        once = await fleet.client.status()
        assert once.pushes == status.pushes and once.time is not None
        replicas = (await fleet.client.list_replicas()).replicas
        assert [[push.received_bytes for push in each.pushes] for each in replicas] == [[0], [64]]
        for stream, daemon in zip(streams, fleet.daemons, strict=True):
            stream.detach()
            daemon.registry.discard("p")
        async with fleet.client.watch_status(interval_s=0.1) as watched:
            async for status in watched:
                if not status.pushes:
                    break
