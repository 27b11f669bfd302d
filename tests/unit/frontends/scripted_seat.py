"""Where a process of tests.unit.frontends sits."""

import json
from collections.abc import Sequence
from typing import Any

from genserve.engine.types import UsedAdapter


class Seat:
    """A place at no engine. `script` is what the next process there does; `calls` what the seat was asked."""

    def __init__(self, **script: Any) -> None:
        self.script = script
        self.calls: list[Any] = []
        self.fds: Sequence[int] = ()
        self.num_requests = 3

    @property
    def invitation(self) -> bytes:
        """For `scripted_frontend`."""
        return json.dumps(self.script).encode()

    async def use_adapter(self, name: str, request_id: str) -> UsedAdapter:
        """Any name is loaded."""
        self.calls.append(("use", name, request_id))
        return UsedAdapter(f"{name}#1", 1, "/", 3)

    def release_adapter(self, request_id: str) -> None:
        """It is not used any more."""
        self.calls.append(("release", request_id))

    def vacate(self) -> list[str]:
        """One request is left of each process."""
        self.calls.append("vacate")
        return ["left"]

    async def abort(self, ids: Sequence[str]) -> None:
        """It ends."""
        self.calls.append(("abort", list(ids)))

    def close(self) -> None:
        """The end."""
        self.calls.append("close")
