"""The weights that a sleep of level 2 has dropped, applied anew from the resident bytes before the engine can run."""

from contextlib import AbstractAsyncContextManager

from genserve.errors import EngineTaintedError
from genserve.weights.registry import PushRegistry
from genserve.weights.update import WeightUpdater

_HOLDER = "wake-up"


class DroppedWeights:
    """See `control.sleep.RestoresWeights`. Pushes are kept away meanwhile: a worker prepares one version at a time."""

    def __init__(self, pushes: PushRegistry, updater: WeightUpdater) -> None:
        self._pushes = pushes
        self._updater = updater

    def between_pushes(self, timeout_s: float) -> AbstractAsyncContextManager[None]:
        """A time in which no push is applied."""
        return self._updater.between_pushes(timeout_s)

    async def restore_dropped(self) -> None:
        """Applies the served version over weights that are of none."""
        cause = EngineTaintedError(
            "the weights are of no version, since a sleep of level 2 dropped them or a commit failed; the engine "
            "sleeps on, with its weights awake: push a complete version, then wake up the rest"
        )
        await self._pushes.reserve(_HOLDER)
        try:
            await self._updater.restore(cause)
        finally:
            self._pushes.release()
