"""LoRA adapters: pushed from a trainer's memory, or loaded from the daemon's disk, and used by name."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any, Unpack, cast

from genserve.client.weights.calls import WeightCalls
from genserve.client.weights.modules import is_module
from genserve.client.weights.options import PushOptions, SendOptions
from genserve.client.weights.results import PushResult
from genserve.client.weights.sources import tensor_sources
from genserve.errors import InvalidFieldError
from genserve.tensors.safetensors import CheckpointFileError
from genserve.transport.connection import UNSET, Timeout
from genserve.transport.fields import as_utc, build, duration, naming, refuse_unknown
from genserve.v1 import control_pb2, weights_pb2

_CONFIG_FILE = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter that requests can use. `size_bytes`: of its tensors on the host; `source`: the path that was loaded,
    or the push; `running_requests` use it now; `version`: spans of its requests name it."""

    name: str
    rank: int
    size_bytes: int
    source: str
    load_time: datetime
    running_requests: int
    version: int

    @classmethod
    def of(cls, message: control_pb2.Lora) -> "Lora":
        """From the wire."""
        return cls(
            name=message.lora_name,
            rank=message.rank,
            size_bytes=message.size_bytes,
            source=message.source,
            load_time=as_utc(message.load_time),
            running_requests=message.running_requests,
            version=message.lora_version,
        )


class LoraCalls(WeightCalls):
    """LoRA adapters. They need a daemon that was started with --enable-lora: without it there are none, and calls that
    would change them raise UnsupportedError."""

    async def push_lora(
        self,
        lora_name: str,
        tensors: Mapping[str, Any] | str | PathLike[str],
        config: Mapping[str, Any] | None = None,
        *,
        version: int | None = None,
        expected_version: int | None = None,
        force: bool = False,
        timeout_s: Timeout = UNSET,
        **options: Unpack[SendOptions],
    ) -> PushResult:
        """Streams an adapter into the daemon, whose later requests with this `lora_name` use it. Nothing touches a
        disk, and nothing is paused. One that is loaded under the name is replaced: requests that run go on with it.

        `tensors`: a mapping of PEFT's names (base_model.model.(module).lora_A.weight, .lora_B.weight) to torch tensors
        or numpy arrays, as `peft.get_peft_model_state_dict` gives; `config`: PEFT's configuration, of which r,
        lora_alpha and target_modules are needed. Or a directory that PEFT has saved, here and not on the daemon's host,
        whose configuration is read from it. `SendOptions` documents the options. DTensors and a broken stream are
        treated as by `push_weights`.

        `version`: of the adapter, above 0, and above that of the one it replaces unless `force`; spans of its requests
        name it, and the result as `push.weight_version`. Default: the next one, 1 if none is loaded under the name.
        `expected_version` refuses the push unless that one is loaded; 0 = none.

        Raises VersionNotNewerError and WeightVersionMismatchError for the version, ManifestMismatchError naming tensors
        that do not fit the model, InvalidFieldError for the configuration, StagingFullError when the daemon holds as
        many adapters as it can, PushRolledBackError with what vLLM says.
        """
        refuse_unknown(options, SendOptions)
        if is_module(tensors):
            raise TypeError("tensors must be those of the adapter, peft.get_peft_model_state_dict(model), not a module")
        if isinstance(tensors, str | os.PathLike) and config is None:
            config = _read_config(Path(tensors))
        if config is None:
            raise TypeError("config: pass PEFT's configuration with the tensors (r, lora_alpha, target_modules)")
        with naming("config"):
            encoded = json.dumps(config, default=_plain)
        adapter = build(weights_pb2.LoraAdapter, {"lora_name": lora_name, "config": encoded}, path="header.lora")
        fields = {
            "push_id": options.get("push_id"),
            "weight_version": version,
            "expected_version": expected_version,
            "force": force,
            "lora": adapter,
        }
        header = build(weights_pb2.PushHeader, fields, path="header", options={"weight_version": "version"})
        if version is not None and header.weight_version == 0:  # which means the next one on the wire
            problem = "version=0: must be above 0; leave it out for the next one"
            raise InvalidFieldError.of("header.weight_version", problem)
        sources = tensor_sources(tensors, tied_once=False, rename=options.get("rename"))
        return await self._send(sources, header, cast(PushOptions, options), timeout_s)

    async def load_lora(self, lora_name: str, path: str | PathLike[str], *, timeout_s: float = 60.0) -> Lora:
        """Loads an adapter from a directory on the daemon's host, as PEFT saves it, under the next version. Otherwise
        it behaves as `push_lora`."""
        with naming("path"):
            directory = os.fspath(path)
        fields = {"lora_name": lora_name, "path": directory, "timeout": duration(timeout_s, "timeout_s")}
        request = build(control_pb2.LoadLoraRequest, fields)
        call_timeout_s = timeout_s + self._connection.timeouts.pause_slack_s
        response = await self._connection.unary(self._connection.control.LoadLora, request, call_timeout_s)
        return Lora.of(response.lora)

    async def unload_lora(self, lora_name: str, *, timeout_s: Timeout = UNSET) -> Lora:
        """Removes an adapter and returns it; running requests keep it. Raises LoraNotFoundError."""
        request = build(control_pb2.UnloadLoraRequest, {"lora_name": lora_name})
        response = await self._connection.unary(self._connection.control.UnloadLora, request, timeout_s)
        return Lora.of(response.lora)

    async def list_loras(self, *, timeout_s: Timeout = UNSET) -> list[Lora]:
        """The adapters that requests can use, in order of their names."""
        request = control_pb2.ListLorasRequest()
        response = await self._connection.unary(self._connection.control.ListLoras, request, timeout_s)
        return [Lora.of(each) for each in response.loras]


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / _CONFIG_FILE
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointFileError(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointFileError(f"{path}: is not a JSON object")
    return config


def _plain(value: Any) -> Any:
    """Converts the sets and enumerations of PEFT's configuration to plain values."""
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
