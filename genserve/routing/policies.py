"""The policies. Each orders the replicas that may serve a request, or leaves the decision to the next one.

`round-robin`: one replica after the other. `requests`: the replica with the fewest sequences to serve. `power-of-two`:
the less loaded of two random replicas. `kv-cache`: the replica with the largest free share of its KV cache. `session`:
the replica that served the session before. `prefix_aware` has the one that needs an index of its own."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import nsmallest
from itertools import islice
from operator import attrgetter
from random import Random
from typing import Final, Protocol

from genserve.routing.replica import Replica, Request

MAX_CANDIDATES: Final = 3
"""The most replicas that a policy names: the first is its choice, the others are for when that cannot be reached."""


class Policy(Protocol):
    """An order of the replicas that may serve a request. It neither waits nor reads a clock of its own."""

    @property
    def name(self) -> str:
        """What people call it by."""

    @property
    def always_decides(self) -> bool:
        """Whether it names a replica for every request. If not, another policy has to follow it."""

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """Returns at most MAX_CANDIDATES of the replicas, best first; () leaves the decision to the next policy.
        `ready` has at least one replica, and only those that may serve the request."""

    def sent(self, request: Request, replica: Replica) -> None:
        """The request goes to this replica, whichever policy chose it. Not called for a replica that was tried in
        vain."""


def least(ready: Sequence[Replica], key: Callable[[Replica], float], rng: Random) -> tuple[Replica, ...]:
    """Returns the MAX_CANDIDATES replicas with the smallest keys, smallest first.

    Equals are in an order of chance: senders that see the same reports would otherwise all choose the same replica.
    Takes a few passes over the replicas and sorts none of them.
    """
    keys = list(map(key, ready))
    smallest = nsmallest(MAX_CANDIDATES, keys)
    last = smallest[-1]
    equal = [replica for replica, its_key in zip(ready, keys, strict=True) if its_key == last]
    if smallest[0] == last:
        return tuple(rng.sample(equal, len(smallest)))
    below = [replica for replica, its_key in zip(ready, keys, strict=True) if its_key < last]
    rng.shuffle(below)
    return (*sorted(below, key=key), *rng.sample(equal, len(smallest) - len(below)))


_REPLICA_ID: Final = attrgetter("replica_id")


class RoundRobin:
    """Goes around the replicas in order of their ids, from one that chance picks: many senders do not all begin at the
    same one. It remembers the id that was last, so a replica that joins or leaves changes nobody else's turn. It does
    not look at the load."""

    name: Final = "round-robin"
    always_decides: Final = True

    def __init__(self, rng: Random, last_id: str | None = None) -> None:
        """`last_id`: the replica whose turn it was last, which may be gone; None = chance picks the first."""
        self._rng = rng
        self._last_id = last_id

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The replica whose turn it is, and those that follow it."""
        circle = sorted(ready, key=_REPLICA_ID)
        if self._last_id is None:
            turn = self._rng.randrange(len(circle))
        else:
            turn = bisect_right(circle, self._last_id, key=_REPLICA_ID)
        chosen = (*circle[turn : turn + MAX_CANDIDATES], *circle[:turn])[:MAX_CANDIDATES]
        # Now, and not when it is sent: requests that are routed at once have to get different turns.
        self._last_id = chosen[0].replica_id
        return chosen

    def sent(self, request: Request, replica: Replica) -> None:
        """The turn was taken when it was asked for."""


_OUTSTANDING: Final = attrgetter("outstanding")


class LeastRequests:
    """Spreads the sequences evenly. It takes a slow replica into account, because its sequences end later."""

    name: Final = "requests"
    always_decides: Final = True

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The replicas with the fewest outstanding sequences."""
        return least(ready, _OUTSTANDING, self._rng)

    def sent(self, request: Request, replica: Replica) -> None:
        """Nothing to remember: `Replica.inflight` has it."""


class PowerOfTwo:
    """For many senders that see the same late reports: they do not all run to the replica that was idle a second ago
    (Mitzenmacher 2001, The Power of Two Choices in Randomized Load Balancing)."""

    name: Final = "power-of-two"
    always_decides: Final = True

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The two replicas, the one with fewer outstanding sequences first."""
        picked = self._rng.sample(ready, min(2, len(ready)))
        return tuple(sorted(picked, key=lambda replica: replica.outstanding))

    def sent(self, request: Request, replica: Replica) -> None:
        """Nothing to remember: each choice is new."""


_KV_PRESSURE: Final = attrgetter("kv_pressure")


class KvCache:
    """For sequences of very different lengths, where their number says little. The use that replicas report is late,
    so what was sent since is added to it: everything would go to one replica until its next report otherwise."""

    name: Final = "kv-cache"
    always_decides: Final = True

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The replicas whose KV cache is used least."""
        return least(ready, _KV_PRESSURE, self._rng)

    def sent(self, request: Request, replica: Replica) -> None:
        """Nothing to remember: `Replica.kv_pressure` has it."""


MAX_SESSIONS: Final = 65_536
SESSION_TTL_S: Final = 3600.0


class Sessions:
    """Keeps a session where its KV cache is, whatever the load there, until that replica restarts, leaves or may not
    serve the request. Where a session begins is for the next policy to decide.

    The table has the `max_sessions` sessions that were used last. One that is not used for `ttl_s` is forgotten.
    """

    name: Final = "session"
    always_decides: Final = False

    def __init__(
        self, clock: Callable[[], float], max_sessions: int = MAX_SESSIONS, ttl_s: float = SESSION_TTL_S
    ) -> None:
        """`clock` gives monotonic seconds."""
        if max_sessions < 1 or not ttl_s > 0:
            raise ValueError(f"max_sessions and ttl_s must be positive, are {max_sessions} and {ttl_s}")
        self._clock = clock
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        # By session id, the one used longest ago first: instance id of its replica, and when it is forgotten.
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def order(self, request: Request, ready: Sequence[Replica]) -> tuple[Replica, ...]:
        """The replica of the session alone; () if it has none."""
        instance_id, forgotten_at_s = self._sessions.get(request.session_id, ("", 0.0))
        if not instance_id or self._clock() >= forgotten_at_s:
            return ()
        return tuple(replica for replica in ready if replica.instance_id == instance_id)

    def sent(self, request: Request, replica: Replica) -> None:
        """The session is at this replica from now on."""
        if not request.session_id:
            return
        now_s = self._clock()
        self._sessions[request.session_id] = (replica.instance_id, now_s + self._ttl_s)
        self._sessions.move_to_end(request.session_id)
        while len(self._sessions) > self._max_sessions or self._is_oldest_over(now_s):
            self._sessions.popitem(last=False)

    def _is_oldest_over(self, now_s: float) -> bool:
        return any(forgotten_at_s <= now_s for _, forgotten_at_s in islice(self._sessions.values(), 1))
