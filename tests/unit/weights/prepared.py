"""A push that is prepared and waits for its commit."""

import asyncio

from genserve.tensors.manifest import Manifest
from genserve.weights.push.types import ApplyOptions, PushAction, PushHeader, PushOutcome, PushState
from tests.unit.weights.conftest import MANIFEST, Rig, header

PART = Manifest(MANIFEST.tensors[:1], 16, partial=True)


def preparing(push_id: str = "p1", version: int = 1, **fields: object) -> PushHeader:
    return header(push_id, version, action=PushAction.PREPARE, attempt="one", **fields)


def state(rig: Rig, push_id: str = "p1") -> PushState:
    return rig.registry.report(push_id).push.state


async def commit(rig: Rig, push_id: str = "p1") -> PushOutcome:
    return await rig.registry.commit(push_id, ApplyOptions())


async def until_freed(rig: Rig, num_discards: int = 1) -> None:
    """Returns when workers hold nothing but the live version."""
    async with asyncio.timeout(30):
        while sum("discard" in call for call in rig.engine.calls) < num_discards:
            await asyncio.sleep(0.001)
    async with rig.applier.between_pushes(30.0):
        assert rig.engine.prepared == {}
