"""The bytes of a push that is here, for those who pull them: workers on other hosts."""

from genserve.weights.push.live_push import LivePush
from genserve.weights.resident import ArenaBytes, ResidentVersion


def readable(push: LivePush) -> ResidentVersion:
    """The bytes of a push, to be read until it is applied, dropped or sent anew: its view raises then. Raises
    PushTruncatedError unless all of them are here and checked."""
    if not push.is_readable:
        raise push.truncation()
    return ResidentVersion(push.header.weight_version, push.weights, PushBytes(push))


class PushBytes(ArenaBytes):
    """The bytes of a push, for as long as they are its: the arena of one that is applied is another version's later."""

    def __init__(self, push: LivePush) -> None:
        super().__init__(push.arena)
        self._push = push

    def check(self) -> None:
        """Raises ValueError when the push has gone on."""
        if not self._push.is_readable:
            raise ValueError(f"push {self._push.push_id!r} is {self._push.lifecycle.state.value}")

    def view(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), not copied."""
        view = super().view(start, end)  # keeps the arena from being taken for another version
        self.check()
        return view

    def close(self) -> None:
        """Nothing: the arena is the push's."""
