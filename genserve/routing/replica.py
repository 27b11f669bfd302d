"""What a policy knows of a replica and of a request. Owns no connection: whoever watches the replicas makes these."""

from dataclasses import dataclass, field
from enum import Enum


class ReplicaState(Enum):
    """Where a replica is between joining the fleet and leaving it. Requests go to READY ones only."""

    CONNECTING = "connecting"
    SYNCING = "syncing"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica last reported, in sequences. It is as old as the interval of the watch.

    `kv_usage`: share of the KV cache in use, in [0, 1]. `tokens_per_second`: output of the last seconds.
    `inflight_at_report`: the sender's own `Replica.inflight` when the report arrived.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    tokens_per_second: float = 0.0
    inflight_at_report: int = 0


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica as the sender of requests (a router, or a client that calls replicas itself) sees it at one moment.

    `replica_id` stays the same when the replica restarts; `instance_id` does not, and with it goes the prefix cache.
    `inflight`: sequences that this sender has sent and not seen end, which it knows without delay. `lora_names`: the
    adapters that are loaded, None if that is not known. `outstanding`: sequences that the replica has to serve, and
    `kv_pressure`: the share of its KV cache that they take; both are the last report, carried on to now.
    """

    replica_id: str
    address: str
    instance_id: str
    state: ReplicaState
    weight_version: int
    max_num_seqs: int
    load: Load = Load()
    inflight: int = 0
    lora_names: frozenset[str] | None = None
    outstanding: int = field(init=False, compare=False)
    kv_pressure: float = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, is {self.max_num_seqs}")
        if self.inflight < 0:
            raise ValueError(f"inflight must not be negative, is {self.inflight}")
        load = self.load
        # What the report has beyond the sender's own requests was sent by others. The sender's own are counted as of
        # now: those of the report may have ended since.
        of_others = max(0, load.running + load.waiting - load.inflight_at_report)
        object.__setattr__(self, "outstanding", self.inflight + of_others)
        # A sequence is taken to use its share of a full batch, until a report tells.
        since_report = (self.inflight - load.inflight_at_report) / self.max_num_seqs
        object.__setattr__(self, "kv_pressure", max(0.0, load.kv_usage + since_report))


@dataclass(frozen=True, slots=True)
class Request:
    """What a policy knows of a request.

    `prefix_blocks`: see `prefix_blocks`. `session_id`: requests with the same one stay together; "" = none.
    `min_weight_version`: None = any. `lora_name`: "" = none. `num_sequences`: what it adds to a replica's load.
    """

    prefix_blocks: tuple[bytes, ...] = ()
    session_id: str = ""
    min_weight_version: int | None = None
    lora_name: str = ""
    num_sequences: int = 1

    def __post_init__(self) -> None:
        if self.num_sequences < 1:
            raise ValueError(f"num_sequences must be at least 1, is {self.num_sequences}")
