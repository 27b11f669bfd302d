"""The bytes of a push for those who pull it: also while they are still arriving."""

from genserve.errors import PushNotFoundError, PushRolledBackError
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range
from genserve.weights.push.lifecycle import State
from genserve.weights.push.live_push import LivePush
from genserve.weights.push.types import LoraAdapter
from genserve.weights.resident import ResidentStore


class PulledPush:
    """A push with bytes in the daemon; once it is applied, `resident` has them, until another version is served."""

    def __init__(self, push: LivePush, resident: ResidentStore) -> None:
        self._push = push
        self._origin = push.header.origin
        self._weights = push.staging.weights
        self._resident = resident

    @property
    def push_id(self) -> str:
        """Its id."""
        return self._push.push_id

    @property
    def origin(self) -> str:
        """The memory that took the bytes first, as in `PushHeader.origin`."""
        return self._origin

    @property
    def weight_version(self) -> int:
        """Its version."""
        return self._push.header.weight_version

    @property
    def manifest(self) -> Manifest:
        """The tensors that it brings."""
        return self._push.staging.manifest

    @property
    def content_digest(self) -> str:
        """Of what it brings; "" = unknown."""
        return self._push.content_digest or self._push.header.content_digest

    @property
    def lora(self) -> LoraAdapter | None:
        """The adapter that it brings."""
        return self._push.header.lora

    @property
    def size_bytes(self) -> int:
        """Size of its byte space, with what completes a partial push."""
        return self._weights.total_bytes

    def there(self, start: int, end: int) -> Range | None:
        """The first bytes of [start, end) that are there and count: those that another attempt has left may be of
        another origin. Their content does not change any more. Raises PushNotFoundError and PushRolledBackError if no
        more will come."""
        self._check()
        if self._is_complete:
            return start, end
        if self._push.lifecycle.state is State.FAILED:
            about = "; ".join(issue.description for issue in self._push.issues)
            raise PushRolledBackError(f"push {self.push_id!r} has failed here: {about}")
        return self._push.staging.counted.first_in(start, end)

    async def wait(self) -> None:
        """Returns when bytes have arrived, or the push has another state."""
        await self._push.arrived.wait()

    async def wait_complete(self) -> None:
        """Returns when every byte has arrived and was checked, and every stream has ended. Raises as `there`."""
        while not self._is_complete:
            self.there(0, 0)
            await self.wait()

    def view(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), not copied. Any thread may call it. Raises as `there`."""
        try:
            view = self._push.staging.arena.view(start, end - start)
        except ValueError:
            raise self._push.not_found() from None
        # Afterwards, because the view keeps the memory from being used for another version.
        self._check()
        return view

    @property
    def _is_complete(self) -> bool:
        return self._push.is_readable or self._push.served is not None

    def _check(self) -> None:
        push = self._push
        if self._origin != push.header.origin:
            raise PushNotFoundError(
                f"another attempt at push {self.push_id!r} has begun, from elsewhere",
                metadata={"push_id": self.push_id},
            )
        if self._weights is not push.staging.weights and self._weights is not push.staging.manifest:
            raise PushNotFoundError(
                f"push {self.push_id!r} was completed from another version since", metadata={"push_id": self.push_id}
            )
        if push.served is not None and not self._resident.serves(push.staging.arena):
            raise PushNotFoundError(
                f"push {self.push_id!r} was applied, and another version is served since",
                metadata={"push_id": self.push_id},
            )
        if push.gone.is_set() or (push.lifecycle.state is State.APPLIED and push.served is None):
            raise push.not_found()
