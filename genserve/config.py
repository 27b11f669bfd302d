"""Settings of the daemon. Each is declared once: the field gives the flag, type, default and help."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Self

from genserve.addresses import is_loopback

FLAG_GROUP = "genserve"
"""Title of the daemon's own flags: --help=genserve shows them."""
MAX_INGEST_PROCESSES = 64
MAX_FRONTENDS = 64
MAX_TIMEOUT_S = 24 * 3600.0
"""What any setting may let somebody wait."""
OPENAI_FLAGS = (
    "api_key",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "ssl_ciphers",
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "response_role",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "tool_parser_plugin",
    "tool_strict_level",
    "exclude_tools_when_tool_choice_none",
    "return_tokens_as_token_ids",
    "enable_prompt_tokens_details",
    "enable_force_include_usage",
    "enable_request_id_headers",
    "sse_keep_alive_interval",
    "allow_credentials",
    "allowed_origins",
    "allowed_methods",
    "allowed_headers",
)
"""vLLM's flags of its OpenAI server that the daemon takes too, as vLLM names their values. None of them lets a request
control the engine."""
WAYS = ("beside", "host", "inplace")
"""The ways in which a worker can take a new version; the one with the shortest pause first."""
WEIGHT_UPDATES = ("auto", *WAYS)
CPU_KV_CACHE_BYTES = 4 << 30
"""Size of the KV cache on a CPU if no flag sets it."""


def ways(device_type: str) -> tuple[str, ...]:
    """The ways that a device has. On a CPU `beside` already uses the host's memory, so there is no `host`."""
    return tuple(way for way in WAYS if device_type != "cpu" or way != "host")


def _setting(default: Any, help: str, choices: Sequence[str] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """How the daemon listens and what it allows. The engine's settings are vLLM's flags."""

    host: str = _setting("127.0.0.1", "address to listen on")
    port: int = _setting(50051, "TCP port to listen on; 0 picks a free one, -1 listens only on --uds")
    uds: str = _setting("", "path of a Unix socket to listen on in addition")
    openai_port: int = _setting(
        -1,
        "TCP port of vLLM's OpenAI server, which serves the same weights over HTTP; 0 picks a free one, -1 starts "
        "none. --help=openai shows its flags",
    )
    allow_insecure: bool = _setting(False, "listen on an address that others can reach, without TLS")
    max_active_requests: int = _setting(
        8192, "limit of running and waiting sequences, above which new requests are refused; a request counts n times"
    )
    max_n: int = _setting(256, "limit of sequences (n) of one request; they start together")
    max_message_bytes: int = _setting(64 << 20, "limit of the size of a message, in bytes")
    max_staging_bytes: int = _setting(
        0,
        "limit of staged and resident bytes together; 0 = twice the checkpoint + 256 MiB, or 64 GiB if the "
        "checkpoint's files are not on this host",
    )
    no_resident_weights: bool = _setting(
        False,
        "free the bytes of a push once it is applied. Saves host memory of the checkpoint's size. Partial pushes, "
        "PullWeights and restoring a version after a failed exchange are not possible then",
    )
    ingest_processes: int = _setting(
        -1,
        f"number of processes that receive pushes, each on a free port, at most {MAX_INGEST_PROCESSES}; 0 = none, the "
        "daemon's own port receives everything; -1 = none on machines with up to 4 cores, otherwise a quarter of the "
        "cores, at most 4",
    )
    frontends: int = _setting(
        -1,
        "number of processes that serve requests for tokens beside the daemon, each on a free port, at most "
        f"{MAX_FRONTENDS}; 0 = none, the daemon's own port serves everything; -1 = none on machines with up to 8 "
        "cores, otherwise an eighth of the cores, at most 4",
    )
    no_shared_memory: bool = _setting(
        False, "receive pushed weights only as bytes: do not read shared memory of trainers on this host"
    )
    weight_update: str = _setting(
        "auto",
        "how a worker takes a new version: beside = build it next to the live one, on the same device, and exchange "
        "them; host = build it in the host's memory and copy it in the pause (GPU only); inplace = load it layer by "
        "layer over the live one, in a longer pause; auto = the first of these that fits into memory",
        WEIGHT_UPDATES,
    )
    trust_request_chat_template: bool = _setting(
        False,
        "accept chat templates in requests (template_params.chat_template). A template is a program that runs in the "
        "daemon for up to 10 s, without a memory limit",
    )
    drain_timeout_s: float = _setting(
        30.0, "time limit of a shutdown, in seconds: requests, pauses and pushes finish within it"
    )
    check: bool = _setting(
        False,
        "check the flags, the addresses, the model's files and the memory, print what was found, start nothing; the "
        "exit status is 0 if nothing failed, else 1",
    )
    headless: bool = _setting(
        False,
        "run workers for a daemon on another host: pass the daemon's flags, and --node-rank or "
        "--data-parallel-start-rank",
    )
    heartbeat_timeout_s: float = _setting(
        5.0,
        "time without an answer from the engine or a worker, in seconds, after which health says NOT_SERVING. The "
        "daemon exits too, unless a long step is running; 0 = no heartbeat",
    )

    def __post_init__(self) -> None:
        if not -1 <= self.port <= 65535:
            raise ValueError(f"--port must be in [-1, 65535], is {self.port}")
        if self.port == -1 and not self.uds:
            raise ValueError("--port -1 listens only on a Unix socket: pass --uds too")
        if not -1 <= self.openai_port <= 65535:
            raise ValueError(f"--openai-port must be in [-1, 65535], is {self.openai_port}")
        if self.openai_port > 0 and self.openai_port == self.port:
            raise ValueError(f"--openai-port must not be the port of gRPC (--port), is {self.openai_port} too")
        if self._listens_on_tcp and not self.allow_insecure and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} can be reached from other hosts, without encryption or authentication: "
                "listen on 127.0.0.1 or --uds, or pass --allow-insecure"
            )
        for name in ("max_active_requests", "max_n", "max_message_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, is {getattr(self, name)}")
        if self.max_staging_bytes < 0:
            raise ValueError(f"--max-staging-bytes must be at least 0, is {self.max_staging_bytes}")
        if not -1 <= self.ingest_processes <= MAX_INGEST_PROCESSES:
            raise ValueError(f"--ingest-processes must be in [-1, {MAX_INGEST_PROCESSES}], is {self.ingest_processes}")
        if not -1 <= self.frontends <= MAX_FRONTENDS:
            raise ValueError(f"--frontends must be in [-1, {MAX_FRONTENDS}], is {self.frontends}")
        for name in ("ingest_processes", "frontends"):
            if self.port == -1 and getattr(self, name) > 0:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} needs TCP ports, and --port -1 has none: pass another --port, or {flag} 0")
        if self.weight_update not in WEIGHT_UPDATES:
            raise ValueError(f"--weight-update must be one of {', '.join(WEIGHT_UPDATES)}, is {self.weight_update!r}")
        for name in ("drain_timeout_s", "heartbeat_timeout_s"):
            # Written so that NaN is refused too.
            if not 0 <= getattr(self, name) <= MAX_TIMEOUT_S:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be in [0, {MAX_TIMEOUT_S:g}], is {getattr(self, name)}")

    @property
    def _listens_on_tcp(self) -> bool:
        return self.port != -1 or self.openai_port != -1

    def num_ingest_processes(self, num_cores: int) -> int:
        """The number of processes that receive pushes. Without a TCP port it is 0."""
        if self.port == -1:
            return 0
        if self.ingest_processes >= 0:
            return self.ingest_processes
        return 0 if num_cores <= 4 else min(4, num_cores // 4)

    def num_frontends(self, num_cores: int) -> int:
        """The number of processes that serve requests beside the daemon. Without a TCP port it is 0."""
        if self.port == -1:
            return 0
        if self.frontends >= 0:
            return self.frontends
        return 0 if num_cores <= 8 else min(4, num_cores // 8)

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Adds a flag for each setting."""
        group = parser.add_argument_group(FLAG_GROUP, "How the daemon listens and what it allows.")
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
        """The settings among parsed flags. Raises ValueError naming an invalid flag."""
        return cls(**{setting.name: values[setting.name] for setting in fields(cls)})


def check_model(model: str) -> None:
    """Raises ValueError for a path that does not exist. Any other name without a file may be a repository."""
    looks_like_path = model.startswith(("/", ".", "~")) or (model.count("/") > 1 and "://" not in model)
    if looks_like_path and not os.path.exists(model):
        hint = ": write the path in full, ~ is not expanded here" if os.path.exists(os.path.expanduser(model)) else ""
        raise ValueError(f"--model: no directory {model}{hint}")
