"""Limits of calls in time."""

from dataclasses import dataclass

from genserve.transport.service_config import default_timeout_s


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
