"""The calls between the daemon and its workers. Imports neither torch nor vllm, because the daemon imports it too.

Messages are msgpack: plain dictionaries, converted from and to these classes at both ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self, cast


class _Message:
    """A dataclass that is sent as a dictionary."""

    def to_wire(self) -> dict[str, Any]:
        """The message as plain data."""
        return asdict(cast(Any, self))

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Self:
        """The message from plain data."""
        return cls(**wire)


@dataclass(frozen=True, slots=True)
class Attach(_Message):
    """Gets a worker ready for pushes. `report_socket`: path of the datagram socket that reports go to; `cpus`: logical
    CPUs that background work may use on the daemon's host; `daemon`: its memory.host.ProcessIdentity, as plain
    data; `daemon_address`: "HOST:PORT" at which other hosts reach it, "" if they cannot. The worker ends
    with the daemon."""

    report_socket: str
    cpus: Sequence[int]
    daemon: Mapping[str, Any]
    daemon_address: str = ""


@dataclass(frozen=True, slots=True)
class Attached(_Message):
    """A worker's answer to Attach. `weight_update` is beside, host or inplace, and `reason` says why;
    `reserved_device_bytes` are kept for pushes, which reach the device through `pinned_host_bytes` of CPU memory;
    `other_host` is the memory.host.host_id of a worker that cannot map the daemon's memory, "" for one that can;
    `model_memory` is in bytes, by what an exchange does with it (`model.audit`); `model_runner` is v1 or v2
    (`vllm_settings`); `error` is empty when it worked."""

    rank: str
    error: str
    weight_update: str = ""
    reason: str = ""
    can_roll_back: bool = False
    reserved_device_bytes: int = 0
    pinned_host_bytes: int = 0
    other_host: str = ""
    model_memory: Mapping[str, int] = field(default_factory=dict)
    model_runner: str = ""


@dataclass(frozen=True, slots=True)
class Fetch(_Message):
    """Has the workers of `ranks` copy the bytes of version `nonce` to their hosts, from the daemon at `address`
    ("HOST:PORT"): PullWeights with `push_id`, or what is served where that is empty. `caller`: the fields of
    CallerFiles, whose paths are the same on all hosts."""

    nonce: str
    ranks: Sequence[str]
    address: str
    push_id: str
    size_bytes: int
    timeout_s: float
    caller: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepare(_Message):
    """Builds version `nonce` from an arena: the daemon's, or on another host the one that `fetched_paths` has for
    that host. `tensors` are (name, safetensors dtype, shape, offset, length in bytes). `arrival_path`: the
    memory.arena.Arrival of bytes that are still arriving; "" if all of them are there."""

    nonce: str
    arena_path: str
    arena_size_bytes: int
    tensors: Sequence[tuple[str, str, Sequence[int], int, int]]
    fetched_paths: Mapping[str, str]
    arrival_path: str = ""


@dataclass(frozen=True, slots=True)
class Step(_Message):
    """Names the prepared version for a commit, rollback or discard."""

    nonce: str


@dataclass(frozen=True, slots=True)
class Sleep(_Message):
    """Says that vLLM is about to release the memory of the weights, at this level: 1 keeps a copy, 2 drops them."""

    level: int
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class Transfer(_Message):
    """A call of vLLM's own weight transfer. `call`: init, start, update, finish, or abandon, which restores the layers
    after an unfinished update. `info`: JSON text for vLLM's init and update."""

    call: str
    info: str = ""
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class AddLora(_Message):
    """Loads an adapter from a directory. `lora_id` is unique and never reused."""

    nonce: str
    lora_id: int
    lora_name: str
    directory: str


@dataclass(frozen=True, slots=True)
class RemoveLora(_Message):
    """Frees an adapter that no request uses."""

    nonce: str
    lora_id: int


@dataclass(frozen=True, slots=True)
class Ack(_Message):
    """A worker's answer. `rank` is "dp0:pp0:pcp0:tp0". `error` is empty on success."""

    rank: str
    nonce: str
    error: str


@dataclass(frozen=True, slots=True)
class AddedLora(Ack):
    """A worker's answer to AddLora. `without_layer`: the modules of the adapter, by vLLM's names, that no layer of this
    worker takes."""

    without_layer: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Described(_Message):
    """The tensors of a checkpoint: (name, safetensors dtype, shape)."""

    tensors: Sequence[tuple[str, str, Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Unused(Ack):
    """A worker's answer to Described. `names`: of the tensors that it does not load."""

    names: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Progress(_Message):
    """Progress of a worker's background work on a version. `arena_path` is where a worker stored the bytes that it
    fetched. `error` is empty unless it is done and failed."""

    rank: str
    nonce: str
    done: bool
    error: str = ""
    arena_path: str = ""


@dataclass(frozen=True, slots=True)
class ReadDigests(_Message):
    """Has a worker read on in its live tensors for about `budget_s`."""

    budget_s: float


@dataclass(frozen=True, slots=True)
class Digests(_Message):
    """SHA-256 (hex) of a worker's live tensors, by name; nothing before all are read (`done`). `spent_s`: how long it
    read, which is how long it kept the engine from its next step. `error` is empty on success."""

    rank: str
    tensors: Mapping[str, str]
    done: bool = True
    spent_s: float = 0.0
    error: str = ""


class WeightWorker(Protocol):
    """The methods of every worker. Arguments and answers are the messages above as plain data."""

    def genserve_attach(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Attach -> Attached. Once, before anything is served."""

    def genserve_unused(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Described -> Unused. Before anything is served."""

    def genserve_ping(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Nothing -> Ack at once: this worker takes calls."""

    def genserve_fetch(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Fetch -> Ack at once; `genserve_fetched` reports the progress."""

    def genserve_fetched(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Progress of fetching. A worker that fetches nothing is done."""

    def genserve_prepare(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Prepare -> Ack at once. When it is done, a second Ack goes to the report socket, if that is on this host."""

    def genserve_prepared(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Progress of preparing."""

    def genserve_commit(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Ack. Exchanges live and prepared weights; only while nothing is scheduled."""

    def genserve_rollback(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Ack. Undoes a commit, whole or partial; without one it does nothing."""

    def genserve_discard(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Step -> Ack. Frees what is prepared, or what a commit replaced."""

    def genserve_sleep(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Sleep -> Ack. Before vLLM's own sleep; only while nothing is scheduled."""

    def genserve_wake(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Nothing -> Ack. After vLLM's own wake-up of the weights. Does nothing if they were awake."""

    def genserve_transfer(self, wire: dict[str, Any]) -> dict[str, Any]:
        """Transfer -> Ack. All but init only while nothing is scheduled."""

    def genserve_add_lora(self, wire: dict[str, Any]) -> dict[str, Any]:
        """AddLora -> AddedLora. Nothing is scheduled meanwhile."""

    def genserve_remove_lora(self, wire: dict[str, Any]) -> dict[str, Any]:
        """RemoveLora -> Ack. Does nothing for an unknown adapter."""

    def genserve_digests(self, wire: dict[str, Any]) -> dict[str, Any]:
        """ReadDigests -> Digests. Nothing is scheduled meanwhile, so it is asked again and again until every live byte
        is read. What was read is known until a call after which other weights or adapters may be live."""
