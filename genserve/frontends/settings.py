"""How the daemon starts a front end, and the questions that they ask each other."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

# The daemon asks a front end.
JOIN = "join"
"""Join the engine that the invitation is for, and serve. Answer: the port."""
CHANGED = "changed"
"""The state has changed: read the words. Answer: nothing, which says that the front end is alive."""
ABORT = "abort"
"""End these requests. Answer: those that ran. A front end asks the daemon the same, about all clients; the answer then
is an AbortResponse."""
PAUSING = "pausing"
"""Requests that the engine aborts from now on end as PAUSED. Answer: how many there are."""
PAUSED = "paused"
"""The engine has aborted them."""
IDLE = "idle"
"""Answer, after a while at most: whether no request is left."""
STOP = "stop"
"""Let calls end within the grace period, and end."""

# A front end asks the daemon.
USE_ADAPTER = "use adapter"
RELEASE_ADAPTER = "release adapter"

IDLE_PATIENCE_S = 2.0
"""After this time IDLE is answered with no."""


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """The command-line argument of a front end. The descriptors are inherited. `port` 0 picks one."""

    daemon_pid: int
    link_fd: int
    state_fd: int
    host: str
    port: int
    max_message_bytes: int

    def to_json(self) -> str:
        """The settings as an argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The settings from an argument."""
        return cls(**json.loads(text))


def ids_to_values(request_ids: Any) -> Mapping[str, Any]:
    """What ABORT says; None = all."""
    return {"request_ids": None if request_ids is None else list(request_ids)}
