"""Where one request has been tried, and where it is tried next."""

import asyncio
import math
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Final, Generic

from genserve.errors import (
    DrainingError,
    EngineDeadError,
    EngineTaintedError,
    GenserveError,
    LoraNotFoundError,
    NoReplicaError,
    QueueFullError,
    ReplicaLostError,
    RequestIdInUseError,
    WeightVersionMismatchError,
)
from genserve.forward.destinations import Destinations, UpstreamT
from genserve.forward.upstream import is_lost
from genserve.routing.replica import Request

MAX_LOST: Final = 3
"""A request that is there whenever a replica dies may be why: it is not given to all of them in turn."""
PROGRESS_TOKENS: Final = 16
"""A replica that dies after so many tokens of a request does not die of it."""
PAUSE_S: Final = 0.25
"""Before a replica that was tried is tried again, because there is no other: it may start again, or come back."""


class Attempts(Generic[UpstreamT]):
    """One request. `choose` or `next` says where it goes, and counts it there until the next choice or `end`. `failed`
    is told if that was in vain."""

    def __init__(self, fleet: Destinations[UpstreamT], request: Request, remaining_s: float | None = None) -> None:
        self.request = request
        self._fleet = fleet
        # The answer says why it waited in vain, if it comes before the caller's deadline.
        self._last_s = math.inf if remaining_s is None else time.monotonic() + remaining_s - min(0.5, remaining_s / 4)
        self._wait_anew()
        self._instance_id = ""
        self._carried = ExitStack()
        self._tried: set[str] = set()
        self._lost: dict[str, str] = {}  # addresses by instance ids
        self._dead: set[str] = set()  # those that have said so themselves
        self._suspects: list[str] = []  # so many may have died with it that it waits for one to come back
        self._full: QueueFullError | None = None
        self._refusal: GenserveError | None = None
        self._has_begun = False
        self._last_version = 0

    def choose(self, unwanted: Collection[str] = ()) -> UpstreamT | None:
        """Where it goes now, None if it has to wait. `unwanted`: instance ids of replicas where it is not to go now.
        Raises WeightVersionMismatchError if the fleet has no such version, as a daemon does, and ReplicaLostError if it
        has lost too many replicas."""
        if self._suspects:
            self._check_lost()
        if self._suspects:
            return None
        fleet, request = self._fleet, self._known()
        chosen = fleet.choose(request, self._tried.union(unwanted) if unwanted else self._tried)
        if chosen is None:
            self._check_version(request)
            return None
        return self._sent_to(chosen)

    async def next(self) -> UpstreamT:
        """Where it goes, once some replica may serve it. Raises as `choose`, NoReplicaError, and what the replicas say
        if all refuse it. Of a request that goes on elsewhere a part is delivered, so no refusal counts as long as there
        is time."""
        fleet = self._fleet
        while True:
            if (chosen := self.choose()) is not None:
                return chosen
            request = self._known()
            left_s = self._until_s - time.monotonic()
            refusal = self._full if self._full is not None else self._refusal
            if self._suspects:
                if left_s <= 0:
                    raise _lost_error("replicas were lost with this request and may have died of it", self._suspects)
            elif refusal is not None and not self._has_begun and not fleet.elsewhere(request, self._tried):
                raise refusal
            if left_s <= 0:
                raise refusal or NoReplicaError(fleet.why_none(request), retry_after_s=1.0)
            if self._suspects or not self._tried:
                with suppress(TimeoutError):  # nothing was awaited since the choice, so no change was missed
                    async with asyncio.timeout(left_s):
                        await fleet.states_changed.wait()
                continue
            await asyncio.sleep(min(PAUSE_S, left_s))
            if not fleet.elsewhere(request, self._tried):
                self._tried.clear()

    def failed(self, error: GenserveError, upstream: UpstreamT) -> None:
        """The replica did not serve it, and nothing of its answer was delivered. Raises the error to answer if it is
        not to be tried elsewhere."""
        self.end()
        if isinstance(error, DrainingError):
            pass
        elif is_lost(error):
            self._count_lost(error, upstream)
        elif isinstance(error, QueueFullError):
            self._full = error.with_traceback(None)
        elif isinstance(error, WeightVersionMismatchError):
            self._check_version(self._known(), error)
            known = upstream.least_version
            if known is not None and known < self._last_version:
                self._refusal = error.with_traceback(None)  # it serves what it is known for
            else:
                self._fleet.doubt(upstream)
        elif isinstance(error, EngineTaintedError) or (
            isinstance(error, LoraNotFoundError) and not self._fleet.knows_adapters
        ):
            self._refusal = error.with_traceback(None)
        elif isinstance(error, RequestIdInUseError) and self._has_begun:
            self._refusal = error.with_traceback(None)  # until the other request with this id has ended
        elif not (isinstance(error, RequestIdInUseError) and self._instance_id in self._lost):
            raise error  # of a connection that broke, the daemon may not know yet
        self._tried.add(self._instance_id)

    def begin_again(self, error: GenserveError, upstream: UpstreamT, num_tokens: int, version: int) -> None:
        """The replica is lost after so many tokens, the last of them of this version of the weights, and the request
        goes on elsewhere: it may wait as long as at first. Raises ReplicaLostError if it has lost too many replicas."""
        self.end()
        self._has_begun = True
        self._last_version = version
        if num_tokens >= PROGRESS_TOKENS:
            self._lost.clear()
        self._count_lost(error, upstream)
        self._wait_anew()
        self._tried.add(self._instance_id)

    def end(self) -> None:
        """It counts nowhere any more."""
        self._carried.close()

    def _wait_anew(self) -> None:
        self._until_s = min(time.monotonic() + self._fleet.wait_ready_s, self._last_s)

    def _count_lost(self, error: GenserveError, upstream: UpstreamT) -> None:
        if not self._lost:
            self._wait_anew()  # it may have run for longer than a request waits
        if isinstance(error, EngineDeadError):
            self._dead.add(self._instance_id)
        self._lost[self._instance_id] = upstream.address
        self._full = self._refusal = None  # these are older
        self._fleet.lose(upstream)
        self._check_lost(self._instance_id)

    def _check_lost(self, just_lost: str = "") -> None:
        """Raises ReplicaLostError if too many of the replicas that it has lost have died: to others only a connection
        broke."""
        dead, suspects = [], []
        for instance_id, address in self._lost.items():
            lives = False if instance_id in self._dead else self._fleet.lives(instance_id, address)
            if lives and instance_id != just_lost:  # its watch may not know yet
                continue
            suspects.append(address)
            if lives is not None:
                dead.append(address)
        if len(dead) >= MAX_LOST:
            raise _lost_error("replicas died with this request, one after the other", dead)
        self._suspects = suspects if len(suspects) >= MAX_LOST else []

    def _sent_to(self, upstream: UpstreamT) -> UpstreamT:
        self._carried.close()
        self._carried.enter_context(self._fleet.carrying(self.request, upstream))
        self._instance_id = upstream.instance_id
        return upstream

    def _known(self) -> Request:
        """The request, and what is known of it. It goes on with weights that are not older than those of its last
        token; if nobody but the replica that is lost has told of those yet, another one says whether it has them.
        Nobody may know its adapter yet, or it may not exist: the replica says so."""
        request = self.request
        if (request.min_weight_version or 0) < self._last_version <= self._fleet.newest_version:
            request = replace(request, min_weight_version=self._last_version)
        if request.lora_name and not self._fleet.elsewhere(request, ()):
            return replace(request, lora_name="")
        return request

    def _check_version(self, request: Request, error: WeightVersionMismatchError | None = None) -> None:
        committed, asked = self._fleet.committed_version, request.min_weight_version
        if committed is None or asked is None or asked <= committed:
            return
        if error is None and self._fleet.elsewhere(request, ()):
            return  # those that have it were tried
        raise error or WeightVersionMismatchError(
            f"version {committed} is served, the request needs {asked}",
            metadata={"weight_version": str(committed)},
        )


def _lost_error(what: str, addresses: Iterable[str]) -> ReplicaLostError:
    return ReplicaLostError(f"{what}: {', '.join(dict.fromkeys(addresses))}")
