"""How long a replica may take to answer, in seconds. Every call to one ends: it may be there and yet do nothing.

A stream of tokens or of status reports has no such limit. It ends with the client's call, or when the watch finds that
the replica is silent.
"""

from typing import Final

from google.protobuf.duration_pb2 import Duration

from genserve.rpc.convert.control import DEFAULT_LOAD_TIMEOUT_S, DEFAULT_PAUSE_TIMEOUT_S
from genserve.v1 import control_pb2, weights_pb2
from genserve.weights.push.types import DEFAULT_APPLY_TIMEOUT_S, DEFAULT_PREPARED_TTL_S
from genserve.wire.conversions import seconds_of

ASK_S: Final = 10.0
"""For what a daemon knows, or does at once."""
TOKENIZE_S: Final = 30.0
"""For a long prompt; and for an abort."""
DIGEST_S: Final = 630.0
"""For digests of all live weights, which take a daemon up to ten minutes."""
RESUME_S: Final = 60.0
RESET_S: Final = 60.0
WAKE_S: Final = 600.0
DISCARD_S: Final = 30.0
FETCH_S: Final = 6 * 3600.0
"""For a version: 2 TB at 100 MB/s. A bound only: a fetch that stands still ends by itself after its `staging_ttl`."""
_APPLY_SLACK_S: Final = 30.0


def apply_s(apply: weights_pb2.ApplyOptions) -> float:
    """For a push that is applied or prepared."""
    return _seconds_or(apply.timeout, DEFAULT_APPLY_TIMEOUT_S) + _APPLY_SLACK_S


def pause_s(request: control_pb2.PauseRequest | control_pb2.SleepRequest) -> float:
    """For a pause, or for a sleep, which pauses first."""
    return _seconds_or(request.timeout, DEFAULT_PAUSE_TIMEOUT_S) + ASK_S


def load_lora_s(request: control_pb2.LoadLoraRequest) -> float:
    """For an adapter that is loaded from a directory."""
    return _seconds_or(request.timeout, DEFAULT_LOAD_TIMEOUT_S) + ASK_S


def prepared_ttl_s(header: weights_pb2.PushHeader) -> float:
    """How long a replica keeps what it has prepared."""
    return _seconds_or(header.prepared_ttl, DEFAULT_PREPARED_TTL_S)


def _seconds_or(duration: Duration, default_s: float) -> float:
    seconds = seconds_of(duration)
    return seconds if seconds > 0 else default_s
