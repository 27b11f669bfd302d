"""Who has asked for tokens: another process, for a router; the program itself, for a client that calls replicas."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from genserve.errors import GenserveError

if TYPE_CHECKING:
    from grpc.aio import UnaryStreamCall


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one request of a stream by an error."""

    request_id: str
    error: GenserveError


class Caller(Protocol):
    """Gets the answer of one call. A write waits while the caller does not read."""

    def remaining_s(self) -> float | None:
        """The time until the call's deadline, None = it has none."""

    async def admitted(self) -> None:
        """The call has been admitted: by a replica, or as a stream."""

    async def write(self, data: bytes) -> None:
        """Passes on a message of the answer."""

    async def fail(self, failures: Sequence[Failure]) -> None:
        """Tells of requests of a stream that have failed."""

    async def refused(self, call: "UnaryStreamCall[bytes, bytes]") -> None:
        """The error that is raised next is the answer of this call of a replica."""
