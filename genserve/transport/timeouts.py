"""Limits of calls in time, and their retries, from the files of `genserve/v1` that clients of every language share.

gRPC treats a `timeout` of its service config as an upper limit on the deadline of a call. Here it is the default of a
call that asks for none, so it has a file of its own.
"""

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

SERVICE_CONFIG: Final = resources.files("genserve.v1").joinpath("service_config.json").read_text(encoding="utf-8")
"""The retries, as gRPC takes them."""
_DEFAULT_TIMEOUTS_S: Final[dict[str, Any]] = json.loads(
    resources.files("genserve.v1").joinpath("default_timeouts.json").read_text(encoding="utf-8")
)


def default_timeout_s(service: str, method: str) -> float | None:
    """The deadline of a call that asks for none, in seconds; None = it has none. Names as in the proto files, without
    the package."""
    of_service = _DEFAULT_TIMEOUTS_S[f"genserve.v1.{service}"]
    timeout_s: float | None = _DEFAULT_TIMEOUTS_S.get(f"genserve.v1.{service}/{method}", of_service)
    return timeout_s


def num_attempts(service: str, method: str) -> int:
    """How often gRPC makes a call while the daemon is UNAVAILABLE."""
    name = {"service": f"genserve.v1.{service}", "method": method}
    configs = json.loads(SERVICE_CONFIG)["methodConfig"]
    return next((int(each["retryPolicy"]["maxAttempts"]) for each in configs if name in each["name"]), 1)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits, in seconds, of calls without a `timeout_s`. None = no limit. The first three are by default those of
    default_timeouts.json."""

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
