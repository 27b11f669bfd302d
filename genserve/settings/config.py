"""Settings of the daemon. Each is declared once: the field gives the flag, type, default and help."""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from genserve.security.access import environment_lists_callers
from genserve.settings.flags import add_flags, flag_of, setting, values_of
from genserve.settings.listen_config import ListenConfig

FLAG_GROUP = "genserve"
"""Title of the daemon's own flags: --help=genserve shows them."""
MAX_INGEST_PROCESSES = 64
MAX_FRONTENDS = 64
MAX_TIMEOUT_S = 24 * 3600.0
"""What any setting may let somebody wait."""
WRITE_TIMEOUT_S = 300.0
"""What a client may take to read a message, if no flag sets it: enough for a trainer that reads between its steps."""
OPENAI_FLAGS = (
    "api_key",
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
_MODEL_CONFIGS: Final = ("config.json", "params.json")
"""One of which a model's directory has: transformers' or Mistral's. Where vLLM looks first comes first."""
_SAYS_KIND: Final = frozenset({"model_type", "auto_map", "speculators_config"})
"""Keys of config.json, one of which says what kind of model it is. auto_map does it by a program beside it."""
MODEL_COMES_FIRST: Final = "a model is the first argument, or follows --model"
"""What is said of an argument that is neither."""
CPU_KV_CACHE_BYTES = 4 << 30
"""Size of the KV cache on a CPU if no flag sets it."""


def ways(device_type: str) -> tuple[str, ...]:
    """The ways that a device has. On a CPU `beside` already uses the host's memory, so there is no `host`."""
    return tuple(way for way in WAYS if device_type != "cpu" or way != "host")


@dataclass(frozen=True, slots=True)
class ServeConfig(ListenConfig):
    """How the daemon listens and what it allows. The engine's settings are vLLM's flags."""

    openai_port: int = setting(
        -1,
        "TCP port of vLLM's OpenAI server, which serves the same weights over HTTP; 0 picks a free one, -1 starts "
        "none. --help=openai shows its flags",
    )
    max_active_requests: int = setting(
        8192, "limit of running and waiting sequences, above which new requests are refused; a request counts n times"
    )
    max_n: int = setting(256, "limit of sequences (n) of one request; they start together")
    max_staging_bytes: int = setting(
        0,
        "limit of staged and resident bytes together; 0 = twice the checkpoint + 256 MiB, and an adapter with "
        "--enable-lora, or 64 GiB if the checkpoint's files are not on this host",
    )
    no_resident_weights: bool = setting(
        False,
        "free the bytes of a push once it is applied. Saves host memory of the checkpoint's size. Partial pushes, "
        "PullWeights and restoring a version after a failed exchange are not possible then",
    )
    keep_committed: str = setting(
        "",
        "directory of this daemon, on a disk with room for three checkpoints: each version that is pushed is written "
        "there beside serving, and the next start with it serves the latest one instead of the model's weights",
    )
    ingest_processes: int = setting(
        -1,
        f"number of processes that receive pushes, each on a free port, at most {MAX_INGEST_PROCESSES}; 0 = none, the "
        "daemon's own port receives everything; -1 = none on machines with up to 4 cores, otherwise a quarter of the "
        "cores, at most 4",
    )
    frontends: int = setting(
        -1,
        "number of processes that serve requests for tokens beside the daemon, each on a free port, at most "
        f"{MAX_FRONTENDS}; 0 = none, the daemon's own port serves everything; -1 = none on machines with up to 8 "
        "cores, otherwise an eighth of the cores, at most 4",
    )
    no_shared_memory: bool = setting(
        False, "receive pushed weights only as bytes: do not read shared memory of trainers on this host"
    )
    weight_update: str = setting(
        "auto",
        "how a worker takes a new version: beside = build it next to the live one, on the same device, and exchange "
        "them; host = build it in the host's memory and copy it in the pause (GPU only); inplace = load it layer by "
        "layer over the live one, in a longer pause; auto = the first of these that fits into memory",
        WEIGHT_UPDATES,
    )
    trust_request_chat_template: bool = setting(
        False,
        "accept chat templates in requests (template_params.chat_template). A template is a program that runs in the "
        "daemon for up to 10 s, without a memory limit",
    )
    drain_timeout_s: float = setting(30.0, "time limit of a shutdown: requests, pauses and pushes finish within it")
    write_timeout_s: float = setting(
        WRITE_TIMEOUT_S,
        "time that a client may take to read a message of tokens, after which its stream ends; 0 = any",
    )
    check: bool = setting(
        False,
        "check the flags, the addresses, the model's files and the memory, print what was found, start nothing; the "
        "exit status is 0 if nothing failed, else 1",
    )
    headless: bool = setting(
        False,
        "run workers for a daemon on another host: pass the daemon's flags, and --node-rank or "
        "--data-parallel-start-rank",
    )
    heartbeat_timeout_s: float = setting(
        5.0,
        "time without an answer from the engine or a worker, after which health says NOT_SERVING. The "
        "daemon exits too, unless a long step is running; 0 = no heartbeat",
    )

    def __post_init__(self) -> None:
        if not -1 <= self.openai_port <= 65535:
            raise ValueError(f"--openai-port must be in [-1, 65535], is {self.openai_port}")
        ListenConfig.__post_init__(self)  # `super()` does not find its class among those with slots
        if self.metrics_port > 0 and self.metrics_port == self.openai_port:
            raise ValueError(f"--metrics-port must not be another port of the daemon, is {self.metrics_port} too")
        if self.openai_port > 0 and self.openai_port == self.port:
            raise ValueError(f"--openai-port must not be the port of gRPC (--port), is {self.openai_port} too")
        for name in ("max_active_requests", "max_n"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag_of(name)} must be at least 1, is {getattr(self, name)}")
        if self.keep_committed and self.no_resident_weights:
            raise ValueError("--keep-committed writes what --no-resident-weights frees: leave one of them out")
        if self.max_staging_bytes < 0:
            raise ValueError(f"--max-staging-bytes must be at least 0, is {self.max_staging_bytes}")
        if not -1 <= self.ingest_processes <= MAX_INGEST_PROCESSES:
            raise ValueError(f"--ingest-processes must be in [-1, {MAX_INGEST_PROCESSES}], is {self.ingest_processes}")
        if not -1 <= self.frontends <= MAX_FRONTENDS:
            raise ValueError(f"--frontends must be in [-1, {MAX_FRONTENDS}], is {self.frontends}")
        for name in ("ingest_processes", "frontends"):
            if self.port == -1 and getattr(self, name) > 0:
                flag = f"{flag_of(name)}"
                raise ValueError(f"{flag} needs TCP ports, and --port -1 has none: pass another --port, or {flag} 0")
        if self.weight_update not in WEIGHT_UPDATES:
            raise ValueError(f"--weight-update must be one of {', '.join(WEIGHT_UPDATES)}, is {self.weight_update!r}")
        for name in ("drain_timeout_s", "heartbeat_timeout_s", "write_timeout_s"):
            # Written so that NaN is refused too.
            if not 0 <= getattr(self, name) <= MAX_TIMEOUT_S:
                flag = f"{flag_of(name)}"
                raise ValueError(f"{flag} must be in [0, {MAX_TIMEOUT_S:g}] s, is {getattr(self, name):g}")

    @property
    def listens_on_tcp(self) -> bool:
        """Whether there is a port, and not only a Unix socket."""
        return (self.port, self.openai_port, self.metrics_port) != (-1, -1, -1)

    @property
    def with_openai(self) -> bool:
        """Whether vLLM's OpenAI server is to be started."""
        return self.openai_port != -1

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
        add_flags(group, cls)

    @classmethod
    def from_flags(cls, values: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Self:
        """The settings among parsed flags. Raises ValueError naming an invalid flag."""
        return cls(**values_of(cls, values), environment_lists_callers=environment_lists_callers(environment))


def check_model(model: str, *, has_config_elsewhere: bool = False) -> None:
    """Raises ValueError for an empty name, as of a shell's variable that is not set, for a path that does not exist,
    and for a directory without a configuration that can be read, unless other flags say where it is. Any other name
    without a file may be a repository."""
    if not model:
        raise ValueError("--model: names no model")
    looks_like_path = model.startswith(("/", ".", "~")) or (model.count("/") > 1 and "://" not in model)
    if looks_like_path and not os.path.exists(model):
        hint = ": write the path in full, ~ is not expanded here" if os.path.exists(os.path.expanduser(model)) else ""
        raise ValueError(f"--model: no directory {model}{hint}")
    if os.path.isdir(model) and not has_config_elsewhere:
        _check_model_config(model)


def _check_model_config(directory: str) -> None:
    found = [path for name in _MODEL_CONFIGS if os.path.exists(path := os.path.join(directory, name))]
    if not found:
        raise ValueError(
            f"--model: the directory {directory} has no {_MODEL_CONFIGS[0]}: name one that save_pretrained has written"
        )
    try:
        with open(found[0], encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model: {found[0]} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--model: {found[0]} is not a JSON object")
    if [os.path.basename(path) for path in found] == [_MODEL_CONFIGS[0]] and _SAYS_KIND.isdisjoint(config):
        raise ValueError(f"--model: {found[0]} has no model_type: name a directory that save_pretrained has written")
