"""Settings of the daemon. Each is declared once: flag, type, default and help come from the field."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

from genserve.memory.host import is_loopback

MAX_INGEST_PROCESSES = 64
MAX_TIMEOUT_S = 24 * 3600.0
WAYS = ("beside", "host", "inplace")
"""How a worker can take a new version; those that pause least first."""
WEIGHT_UPDATES = ("auto", *WAYS)
CPU_KV_CACHE_BYTES = 4 << 30
"""What the KV cache gets on a CPU where no flag says."""


def ways(device_type: str) -> tuple[str, ...]:
    """The ways that differ on a device: on a CPU, beside is in the host's memory already."""
    return tuple(way for way in WAYS if device_type != "cpu" or way != "host")


def _setting(default: Any, help: str, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How the daemon listens and what it allows. vLLM's own settings are vLLM's flags."""

    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(50051, "TCP port to listen on; 0 picks a free one, -1 listens on --uds alone")
    uds: str = _setting("", "path of a Unix socket to listen on as well")
    allow_insecure: bool = _setting(False, "listen on an address that others can reach, without TLS")
    max_active_requests: int = _setting(
        8192, "sequences running and waiting above which new requests are refused: one with n sequences counts n times"
    )
    max_n: int = _setting(256, "most sequences of one request; all of them are begun at once")
    max_message_bytes: int = _setting(64 << 20, "size above which a message is refused")
    max_staging_bytes: int = _setting(
        0, "bytes of pushed weights staged and resident at once; 0 = twice the checkpoint's + 256 MiB"
    )
    no_resident_weights: bool = _setting(
        False,
        "free the bytes of a push once it is applied: saves the checkpoint's size of memory, and gives up partial "
        "pushes, PullWeights, and restoring a version whose exchange could not be undone",
    )
    ingest_processes: int = _setting(
        -1,
        "processes that receive pushed weights on ports of their own, picked by the system; 0 = none, the daemon's own "
        "port takes everything; -1 = none on machines of up to 4 cores, a quarter of the cores but at most 4 on others",
    )
    no_shared_memory: bool = _setting(
        False, "take pushed weights as bytes alone: trainers on this host may not hand over shared memory instead"
    )
    weight_update: str = _setting(
        "auto",
        "how a worker takes a new version: beside = built next to the live one, on its device, and exchanged; "
        "host = built in the host's memory and copied over in the pause (GPU only); inplace = layer by layer over the "
        "live one, in a longer pause; auto = the first of them that there is memory for",
        WEIGHT_UPDATES,
    )
    trust_request_chat_template: bool = _setting(
        False,
        "take chat templates from requests (template_params.chat_template): such a template is a program that runs in "
        "the daemon, for up to 10 s, with as much memory as it likes",
    )
    drain_timeout_s: float = _setting(
        30.0, "seconds that everything may take to finish at a shutdown: requests, pauses and pushes"
    )
    headless: bool = _setting(
        False,
        "run the workers of another host for the daemon of the first host: the same flags as there, and --node-rank "
        "or --data-parallel-start-rank",
    )
    heartbeat_timeout_s: float = _setting(
        5.0,
        "seconds without an answer of the engine or of one of its workers after which health says NOT_SERVING, and the "
        "daemon exits unless a step is what takes long; 0 = no heartbeat",
    )

    def __post_init__(self) -> None:
        if not -1 <= self.port <= 65535:
            raise ValueError(f"--port must lie in [-1, 65535], is {self.port}")
        if self.port == -1 and not self.uds:
            raise ValueError("--port -1 listens on a Unix socket alone: give --uds as well")
        if self.port != -1 and not self.allow_insecure and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} can be reached by others, and nothing is encrypted or authenticated: "
                "listen on 127.0.0.1 or --uds, or say --allow-insecure"
            )
        for name in ("max_active_requests", "max_n", "max_message_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, is {getattr(self, name)}")
        if self.max_staging_bytes < 0:
            raise ValueError(f"--max-staging-bytes must be at least 0, is {self.max_staging_bytes}")
        if not -1 <= self.ingest_processes <= MAX_INGEST_PROCESSES:
            raise ValueError(f"--ingest-processes must lie in [-1, {MAX_INGEST_PROCESSES}], is {self.ingest_processes}")
        if self.weight_update not in WEIGHT_UPDATES:
            raise ValueError(f"--weight-update must be one of {', '.join(WEIGHT_UPDATES)}, is {self.weight_update!r}")
        for name in ("drain_timeout_s", "heartbeat_timeout_s"):
            # Written so that NaN is refused too.
            if not 0 <= getattr(self, name) <= MAX_TIMEOUT_S:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must lie in [0, {MAX_TIMEOUT_S:g}], is {getattr(self, name)}")

    def num_ingest_processes(self, num_cores: int) -> int:
        """How many processes receive pushes beside the daemon; without a TCP port none can."""
        if self.port == -1:
            return 0
        if self.ingest_processes >= 0:
            return self.ingest_processes
        return 0 if num_cores <= 4 else min(4, num_cores // 4)

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Adds a flag for each setting."""
        group = parser.add_argument_group("genserve", "How the daemon listens and what it allows.")
        for setting in fields(cls):
            assert setting.default is not MISSING
            flag = f"--{setting.name.replace('_', '-')}"
            help = setting.metadata["help"]  # vLLM's parser adds the default
            if setting.type is bool or setting.type == "bool":
                group.add_argument(flag, action="store_true", default=setting.default, help=help)
            else:
                kind, choices = type(setting.default), setting.metadata["choices"]
                group.add_argument(flag, type=kind, default=setting.default, choices=choices, help=help)

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> Self:
        """The settings among parsed flags; raises ValueError naming the flag that cannot be."""
        return cls(**{setting.name: values[setting.name] for setting in fields(cls)})


def check_model(model: str) -> None:
    """Raises ValueError for a path where nothing is. Whatever else has no file of its name may be a repository's."""
    if model.startswith(("/", ".", "~")) and not os.path.exists(model):
        hint = ": write it out, ~ is not expanded here" if os.path.exists(os.path.expanduser(model)) else ""
        raise ValueError(f"--model: no directory {model}{hint}")
