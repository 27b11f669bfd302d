"""Limits of calls in time, and retries, as `genserve/v1/service_config.json` has them for clients of every language.

gRPC treats a `timeout` of its service config as an upper limit on the deadline of a call. Here it is the default of a
call that asks for none, so gRPC gets the document without it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

_DOCUMENT: Final[dict[str, Any]] = json.loads(
    resources.files("genserve.v1").joinpath("service_config.json").read_text(encoding="utf-8")
)


def default_timeout_s(service: str, method: str) -> float | None:
    """The deadline of a call that asks for none, in seconds; None = it has none. Names as in the proto files, without
    the package."""
    text = method_config(service, method).get("timeout")
    return None if text is None else float(text.removesuffix("s"))


def method_config(service: str, method: str) -> dict[str, Any]:
    """What the document says of a call; empty if it says nothing."""
    told = dict(_configs())
    service = f"genserve.v1.{service}"
    return told.get((service, method), told.get((service, ""), {}))


def grpc_service_config() -> str:
    """What gRPC is given: the retries."""
    kept = [{key: value for key, value in each.items() if key != "timeout"} for each in _DOCUMENT["methodConfig"]]
    return json.dumps({**_DOCUMENT, "methodConfig": kept})


def _configs() -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """By service and method; no method = the others of the service."""
    for config in _DOCUMENT["methodConfig"]:
        for name in config["name"]:
            yield (name["service"], name.get("method", "")), config


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits, in seconds, of calls without a `timeout_s`. None = no limit. The first three are by default those of the
    service config."""

    control_s: float | None = default_timeout_s("ControlService", "GetStatus")
    """All calls except those below."""
    generate_s: float | None = default_timeout_s("GenerationService", "Generate")
    """Generate, from the call to its last token."""
    push_s: float | None = default_timeout_s("WeightService", "PushWeights")
    """A weight push: all bytes, retries and applying together."""
    pause_slack_s: float = 10.0
    """Time that a pause gets on top of its `timeout_s`."""
    undo_slack_s: float = 60.0
    """Time that a call of vLLM's weight transfer gets on top of its `timeout_s`: a failed update is undone before the
    answer."""
