"""The wall clock of a replica, which may differ by minutes from that of the router. Pure."""

from google.protobuf.timestamp_pb2 import Timestamp

from genserve.v1 import types_pb2

_JUMP_S = 1.0


class ReplicaClock:
    """By the times that a replica tells with its status."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    def told(self, time: Timestamp, now_s: float) -> None:
        """It has told its time, which has arrived here at `now_s`, Unix seconds.

        Nobody knows how long that took: of several times the one is kept by which a lease ends last, so that none is
        taken to be over too early, until the clock of one of both is set."""
        ahead_s = time.ToNanoseconds() / 1e9 - now_s
        if self._ahead_s is None or not self._ahead_s <= ahead_s <= self._ahead_s + _JUMP_S:
            self._ahead_s = ahead_s

    def lease(self, lease: types_pb2.PauseLease) -> types_pb2.PauseLease:
        """A lease of the replica, which ends at a time of this host."""
        if self._ahead_s is None or not lease.HasField("expire_time"):
            return lease
        own = types_pb2.PauseLease()
        own.CopyFrom(lease)
        own.expire_time.FromNanoseconds(max(0, lease.expire_time.ToNanoseconds() - round(self._ahead_s * 1e9)))
        return own
