"""The bytes of a push that workers on other hosts pull."""

from genserve.weights.push.live_push import LivePush
from genserve.weights.resident import ArenaBytes, ResidentVersion


def readable(push: LivePush) -> ResidentVersion:
    """The bytes of a push, readable until it is applied, dropped or sent again: then its view raises. Raises
    PushTruncatedError unless all bytes have arrived and were checked."""
    if not push.is_readable:
        raise push.truncation()
    return ResidentVersion(
        push.header.weight_version,
        push.weights,
        PushBytes(push),
        push_id=push.push_id,
        content_digest=push.weights_digest,
    )


class PushBytes(ArenaBytes):
    """The bytes of a push, as long as they belong to it: after it is applied, its arena may belong to another
    version."""

    def __init__(self, push: LivePush) -> None:
        super().__init__(push.arena)
        self._push = push
        self._weights = push.weights

    def check(self) -> None:
        """Raises ValueError if the push has moved on, or was completed from another version."""
        if not self._push.is_readable or self._push.weights is not self._weights:
            raise ValueError(f"push {self._push.push_id!r} is {self._push.lifecycle.push_state.value}")

    def view(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), not copied."""
        view = super().view(start, end)  # keeps the arena from being reused for another version
        self.check()
        return view

    def close(self) -> None:
        """Does nothing: the arena belongs to the push."""
