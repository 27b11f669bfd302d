"""A push that is prepared and waits for its commit."""

from genserve.tensors.manifest import Manifest
from genserve.weights.push.types import ApplyOptions, PushAction, PushHeader, PushOutcome, PushState
from tests.support.patience import until
from tests.unit.weights.conftest import MANIFEST, Rig, header

PART = Manifest(MANIFEST.tensors[:1], 16, partial=True)


def preparing(push_id: str = "p1", version: int = 1, **fields: object) -> PushHeader:
    return header(push_id, version, action=PushAction.PREPARE, attempt="one", **fields)


def state(rig: Rig, push_id: str = "p1") -> PushState:
    return rig.registry.report(push_id).push.state


def is_preparing(rig: Rig, push_id: str = "p1") -> bool:
    """Whether it is carried out, which it may have to wait for."""
    return push_id in rig.registry.live and state(rig, push_id) is PushState.PREPARING


async def commit(rig: Rig, push_id: str = "p1") -> PushOutcome:
    return await rig.registry.commit(push_id, ApplyOptions())


async def until_freed(rig: Rig, num_discards: int = 1) -> None:
    """Returns when workers hold nothing but the live version."""
    await until(lambda: sum("discard" in call for call in rig.engine.calls) >= num_discards)
    async with rig.applier.between_pushes(30.0):
        assert rig.engine.prepared == {}
