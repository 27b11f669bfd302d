"""Writes weights in the history of a fleet: one write after the other."""

import random

from genserve.client import AsyncClient
from tests.faults.fleet_work import FleetWork, deck, given_up
from tests.faults.history import PushIntent
from tests.support.patience import slow

_TIMEOUT_S = 60.0
_KINDS = {"push": 6, "force": 1, "rollback": 1, "canary": 1}


class FleetTrainer:
    """Pushes, also back to lower versions, rolls back, and brings weights to one replica alone."""

    def __init__(self, work: FleetWork, name: str, rng: random.Random) -> None:
        self._work = work
        self._name = name
        self._rng = rng
        self._kinds = deck(rng, _KINDS)
        self._version = 0
        self._left_out: list[int] = []
        self._num_rollbacks = 0

    async def step(self, client: AsyncClient) -> None:
        """One write."""
        await slow(self._rng.uniform(0, 1.0))
        async with self._work.writing:
            match next(self._kinds):
                case "push":
                    await self._push(client, self._next(), "push", self._rng.random() < 0.15)
                case "force":
                    await self._push(client, self._lower(), "push")
                case "rollback":
                    self._num_rollbacks += 1
                    push_id = f"rollback {self._num_rollbacks}"
                    call = client.load_weights(previous=True, force=True, push_id=push_id, timeout_s=_TIMEOUT_S)
                    await self._work.recorder.call(call, "rollback", self._name)
                case "canary":
                    await self._canary()

    def _next(self) -> PushIntent:
        """Some numbers are left out, for pushes of lower versions."""
        step = self._rng.randrange(1, 4)
        self._left_out += range(self._version + 1, self._version + step)
        self._version += step
        return self._intent(self._version)

    def _lower(self) -> PushIntent:
        if not self._left_out:
            return self._next()
        return self._intent(self._left_out.pop(self._rng.randrange(len(self._left_out))), force=True)

    def _intent(self, version: int, *, force: bool = False) -> PushIntent:
        content = self._rng.choice(self._work.recorder.contents.names)
        return PushIntent(f"push {version}", version, content, force=force)

    async def _push(self, client: AsyncClient, intent: PushIntent, kind: str, is_given_up: bool = False) -> None:
        call = client.push_weights(
            self._work.recorder.contents.whole(intent.content),
            version=intent.version,
            push_id=intent.push_id,
            force=intent.force,
            timeout_s=_TIMEOUT_S,
            chunk_bytes=1 << 16,
        )
        if is_given_up:
            await self._work.recorder.call(given_up(call, self._rng.random()), kind, self._name, push=intent)
        else:
            await self._work.recorder.call(call, kind, self._name, push=intent)

    async def _canary(self) -> None:
        index = self._rng.randrange(len(self._work.processes.addresses))
        intent = self._next() if self._rng.random() < 0.5 else self._lower()
        async with self._work.calm:
            await self._work.until_ready_besides(index)
            async with AsyncClient(self._work.processes.addresses[index]) as replica:
                await self._push(replica, intent, "canary")
