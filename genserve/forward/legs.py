"""The calls to replicas of one call of GenerateMany."""

import asyncio
from typing import Final, Generic

from genserve.aio.change import Change
from genserve.forward.destinations import UpstreamT
from genserve.forward.leg import Leg

IDLE_S: Final = 2.0  # after which a call without requests ends: a replica that shuts down waits for its calls


class Legs(Generic[UpstreamT]):
    """One for each replica that runs some of the requests. `room`: one that was full is so no more, or is gone."""

    def __init__(self) -> None:
        self.room = Change()
        self._legs: dict[UpstreamT, Leg[UpstreamT]] = {}
        self._numbers: set[int] = set()

    @property
    def full(self) -> set[str]:
        """The instance ids of replicas that take nothing more now."""
        return {upstream.instance_id for upstream, leg in self._legs.items() if leg.is_full}

    def to(self, upstream: UpstreamT) -> Leg[UpstreamT] | None:
        """The call to a replica, which stays open until `left`; None = there is none."""
        if (leg := self._legs.get(upstream)) is not None:
            _keep_open(leg)
        return leg

    def open(self, upstream: UpstreamT, timeout_s: float | None) -> Leg[UpstreamT]:
        """Begins a call to a replica."""
        number = next(number for number in range(len(self._numbers) + 1) if number not in self._numbers)
        self._numbers.add(number)
        leg = self._legs[upstream] = Leg.open(upstream, number, timeout_s)
        return leg

    def left(self, leg: Leg[UpstreamT]) -> None:
        """A request is not there any more. Without any, the call ends after a while."""
        if not leg.requests and self._legs.get(leg.upstream) is leg:
            _keep_open(leg)
            leg.idle = asyncio.get_running_loop().call_later(IDLE_S, self._close, leg)

    def forget(self, leg: Leg[UpstreamT]) -> None:
        """The call has ended."""
        _keep_open(leg)
        if leg.sending is not None:
            leg.sending.cancel()
        if self._legs.get(leg.upstream) is leg:
            del self._legs[leg.upstream]
            self.room.tell()

    def free(self, leg: Leg[UpstreamT]) -> None:
        """The caller knows of the end of the call: another one may have its number."""
        self._numbers.discard(leg.number)

    def keep_all(self) -> None:
        """From now on no call ends by itself."""
        for leg in self._legs.values():
            _keep_open(leg)

    def _close(self, leg: Leg[UpstreamT]) -> None:
        self.forget(leg)
        leg.call.cancel()


def _keep_open(leg: Leg[UpstreamT]) -> None:
    if leg.idle is not None:
        leg.idle.cancel()
        leg.idle = None
