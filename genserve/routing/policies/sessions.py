"""`session`: the replica that served the session before."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from genserve.routing.replica import Replica, Request

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
