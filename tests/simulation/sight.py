"""What can be seen of a fleet from outside, from time to time: what it has lost, and where it goes on without it."""

import asyncio
import math
from collections.abc import Sequence

from genserve.control.membership import EPOCHS_PER_S
from tests.simulation.events import ASLEEP, Events, Push
from tests.simulation.network import Network
from tests.simulation.replica import Replica
from tests.simulation.router import RouterHost
from tests.simulation.routers import Routers

_EVERY_S, _UNDONE_S = 0.2, 20.0
_AGREED_S = 20.0
"""Within which one of two routers that have each a part of the fleet gives way, when both reach all replicas."""


class Sight:
    """Notes when pushes and leases are lost, which excuses what the fleet does without them."""

    def __init__(
        self,
        network: Network,
        events: Events,
        replicas: Sequence[Replica],
        routers: Routers,
        *,
        are_clocks_wrong: bool,
    ) -> None:
        self._are_clocks_wrong = are_clocks_wrong
        self._network = network
        self._events = events
        self._replicas = replicas
        self._routers = routers
        self._cut_at_s = -math.inf
        self._one_at_s = 0.0
        self._served: dict[tuple[str, int], int] = {}

    async def look(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            self.note_lost()
            self._note_split()
            if self._are_clocks_wrong:
                self._note_set_back()
            self._served = {(each.address, each.num_runs): each.serves for each in self._replicas}

    def _note_split(self) -> None:
        """Two routers that are cut off from different parts of the fleet may each serve one: neither can know. What
        somebody was told by one of them then may not hold at the other one. It has to end with the cuts."""
        now_s, routers = self._events.now_s, self._looking_after
        links = [
            self._network.link(one.address, each.address) for one in self._routers.running for each in self._replicas
        ]
        if any(link.is_cut for link in links):
            self._cut_at_s = now_s
        if sum(each.fleet.committed is not None for each in routers if each.is_alive) < 2:
            self._one_at_s = now_s
        elif now_s < self._cut_at_s + _AGREED_S:
            for told in (*self._events.pushes, *self._events.leases, *self._events.adapters):
                if told.told_s <= now_s:
                    told.lost_s = min(told.lost_s, max(told.told_s, self._one_at_s))
            for push in self._events.pushes:
                if push.told_s <= now_s:
                    push.gone_s = min(push.gone_s, now_s)
        elif now_s > self._one_at_s + _AGREED_S:
            self._events.violation(f"two routers serve the fleet since {self._one_at_s:.3f}")

    def _note_set_back(self) -> None:
        """A router whose clock was set back numbers its changes below those that only a replica keeps which it does not
        reach. The next router that reaches this replica takes them for the latest: it cannot know."""
        kept = [each.board.membership.record.epoch for each in self._reached]
        if not kept or self._has_gone_on:  # it brings the replica to what it has changed
            return
        now_s, highest = self._events.now_s, max(kept)
        since_s = min((each.at_s for each in self._events.kept if each.epoch == highest), default=now_s)
        later = [each.epoch for each in self._events.kept if each.at_s > since_s and each.epoch > 1]
        if not any(epoch // EPOCHS_PER_S < highest // EPOCHS_PER_S for epoch in later):
            return
        for told in (*self._events.pushes, *self._events.leases, *self._events.adapters):
            if since_s < told.told_s <= now_s:
                told.lost_s = min(told.lost_s, now_s)
        for push in self._events.pushes:
            if since_s < push.told_s <= now_s:
                push.gone_s = min(push.gone_s, now_s)

    def note_lost(self) -> None:
        """Of pushes and leases when nobody is left who has them and can be reached."""
        now_s, router = self._events.now_s, self._routers.in_charge
        reached = self._reached
        served, kept = {each.serves for each in reached}, {each.serves for each in self._replicas}
        leases = {lease for each in reached for lease in each.fleet_leases}
        if any(each.is_asleep for each in reached):
            leases.add(ASLEEP)
        for push in self._events.pushes:
            if push.told_s <= now_s < push.lost_s and push.content not in served:
                push.lost_s = now_s
                self._check_not_overwritten(push, reached)
            if push.lost_s <= now_s < push.gone_s and (
                push.content not in kept
                or (push.content not in served and self._has_gone_on)
                or self._has_gone_on_without(push)
            ):
                push.gone_s = now_s
        adapters = {push_id for each in reached for push_id in each.adapters.values()}
        for change in self._events.adapters:
            if change.push_id and change.told_s <= now_s < change.lost_s and change.push_id not in adapters:
                change.lost_s = now_s
        for lease in self._events.leases:
            if lease.told_s <= now_s < min(lease.lost_s, lease.until_s) and lease.lease_id not in leases:
                lease.lost_s = now_s
            if any(lease.lease_id in each.fleet_leases and not self._is_watched(each) for each in reached):
                lease.unheld_s = now_s
            left_s = now_s - max(lease.failed_s, lease.unheld_s)
            was_there = router.started_s < lease.failed_s
            if _UNDONE_S <= left_s < _UNDONE_S + 0.3 and was_there and lease.lease_id in leases:
                self._events.violation(f"lease {lease.lease_id} is there, {left_s:.1f} s after its pause had failed")

    def _is_watched(self, replica: Replica) -> bool:
        """Whether a router looks after it. One may have left it to a former router that nobody knows to be gone."""
        members = [each.fleet.upstreams[replica.address].member for each in self._looking_after if each.is_alive]
        return any(each.engine is not None for each in members)

    def _has_gone_on_without(self, push: Push) -> bool:
        """Whether a router that did not reach who has it has written down an older version since, above all that was
        written down with it: whoever reads both takes that, also if the router has crashed at once."""
        later = {each.push_id for each in self._events.pushes if each.content >= push.content and not each.alone_at}
        since = [each.epoch for each in self._events.kept if each.at_s >= push.lost_s and each.push_id not in later]
        own = (each.epoch for each in self._events.kept if each.push_id == push.push_id)
        return bool(since) and max(since) > max(own, default=1)

    def _check_not_overwritten(self, push: Push, reached: list[Replica]) -> None:
        """Nobody who can be reached has it any more: only because they have ended, or have something later."""
        for each in () if push.alone_at else reached:
            if self._served.get((each.address, each.num_runs)) == push.content and 0 <= each.serves < push.content:
                self._events.violation(f"{each.address} had push {push.content}, and was brought to {each.serves}")

    @property
    def _looking_after(self) -> list[RouterHost]:
        """The routers that have replicas, or the only one. One that stands by changes nothing, whatever it reaches."""
        running = self._routers.running
        return [each for each in running if each.num_answering > 0 or len(running) == 1]

    @property
    def _reached(self) -> list[Replica]:
        return [each for each in self._replicas if any(self._reaches(one, each) for one in self._looking_after)]

    def _reaches(self, router: RouterHost, replica: Replica) -> bool:
        """Whether nothing is between the two. Of a former router nobody knows yet that it is gone: a replica that it
        had is not free yet."""
        if not replica.is_alive or self._network.link(router.address, replica.address).is_cut:
            return False
        upstream = router.fleet.upstreams.get(replica.address) if router.is_alive else None
        return upstream is None or not upstream.member.is_held

    @property
    def _has_gone_on(self) -> bool:
        """Whether a router has changed anything: then it does not believe who comes later."""
        return any(each.is_alive and each.fleet.desired.is_own for each in self._looking_after)
