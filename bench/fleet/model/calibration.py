"""The constants of the model. Each says where it is from: `measured` here, `read` from the code, or `assumed`."""

from dataclasses import dataclass, replace
from math import inf
from typing import Final

GBIT: Final = 125e6
"""Bytes/s."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Bytes, bytes/s and seconds. Change a constant here when it is measured anew, and run the model again."""

    up: float = 100 * GBIT
    """Of a host's link, trainer and replicas alike."""
    down: float = 100 * GBIT
    latency_s: float = 0.0002
    """One way between two hosts. Assumed: one data centre."""
    chunk_bytes: float = 1 << 20
    """Passed on when it is there as a whole. Read: rpc/frames/pull.py."""
    stream_bytes_per_s: float = 1.17e9
    """Of one gRPC stream. Measured: docs/benchmarks/push.json, `genserve`, 984 MB."""
    process_bytes_per_s: float = 1.17e9
    """That one daemon, or the trainer, sends to all its children together. Assumed: the same, because one process sends
    them; several streams were not faster there, on two cores."""
    start_s: float = 0.05
    """Until the first replica knows the push. Assumed."""
    level_s: float = 0.06
    """From when the parent knows the push until the child does. Read: a GetPush each 20 ms, two calls, a connection and
    an arena (fleet/push/spread.py, weights/load/loader.py); their sum is assumed. Two replicas took 0.2 s longer than
    one where they were measured, with both engines on the same two cores."""
    prepare_bytes_per_s: float = 0.74e9
    """That one replica prepares beside the live weights, while the bytes arrive and it generates. Measured:
    docs/benchmarks/pause.json, `genserve`, 984 MB: all bytes in the time of `receive` and `prepare` together."""
    digest_bytes_per_s: float = 1e9
    """SHA-256 by one thread. Read: tensors/content.py. Each tensor is hashed when it is there, so that only the last
    ones are left when all bytes are. Assumed: the threads keep up with the stream, which takes two, on 8 cores."""
    hashed_last_bytes: float = 64 << 20
    """Of those last ones: one turn of a thread. Read: weights/push/contents.py. A larger tensor takes longer."""
    names_digest: bool = False
    """Whether the trainer's header names the digest: then a replica ends its children's streams only when it has
    computed its own (weights/completion.py)."""
    exchange_s: float = 0.1
    """A commit. Measured: docs/benchmarks/pause.json, `genserve`, 984 MB."""
    exchange_spread_s: float = 0.05
    """Of that, evenly spread: the step that runs has to end. Assumed."""
    call_s: float = 0.0005
    """Of the router's time for each commit call: it has one event loop. Assumed."""
    stall_s: float = 10.0
    """Read: STALL_TIMEOUT_S in rpc/frames/peer.py."""
    silence_s: float = 5.0
    """Until the router misses a host. Read: fleet/config.py."""
    straggler_s: float = 10.0
    """Read: fleet/config.py."""
    kept_s: float = 54.0
    """That the first replica waits, prepared, for the others. Read: `prepared_ttl`, 60 s, of which fleet_push.py takes
    nine tenths."""
    retry_s: float = 1.0
    """From a failed push to the trainer's next one. Assumed."""

    @property
    def link(self) -> float:
        """The most that one stream carries."""
        return min(self.up, self.down, self.stream_bytes_per_s, self.process_bytes_per_s)

    @property
    def sends(self) -> float:
        """The most that one host sends."""
        return min(self.up, self.process_bytes_per_s)

    @property
    def receives(self) -> float:
        """The most that one host receives: it has one source."""
        return min(self.down, self.stream_bytes_per_s)

    @property
    def lag_bytes(self) -> float:
        """What a child lacks of its parent's bytes at least."""
        return self.chunk_bytes + self.latency_s * self.link


def measured(gbit: float) -> Calibration:
    """This software, on links of so many Gb/s."""
    return Calibration(up=gbit * GBIT, down=gbit * GBIT)


def link_bound(gbit: float) -> Calibration:
    """The same if nothing but the links limited it: what the topology itself costs."""
    return replace(
        measured(gbit),
        stream_bytes_per_s=inf,
        process_bytes_per_s=inf,
        prepare_bytes_per_s=inf,
        digest_bytes_per_s=inf,
    )
