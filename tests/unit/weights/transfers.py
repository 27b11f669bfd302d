"""Updates through a transfer backend of vLLM."""

from tests.unit.weights.conftest import Rig

HALF = '{"a": "0123456789abcdef"}'


async def finish(rig: Rig, version: int | None = None, *, force: bool = False) -> int:
    """Ends the update that is open, after it has received something; the version that is served."""
    await rig.transfers.update("", HALF, 60.0)
    return (await rig.transfers.finish("", version, 60.0, force=force)).active_version
