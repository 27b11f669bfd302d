"""Client for a genserve daemon: `AsyncClient` for asyncio, `Client` for everything else.

Importing this loads grpc and protobuf, and neither torch, numpy nor vllm.
"""

from genserve.client.async_client import AsyncClient
from genserve.client.channel import ConnectionSettings, Timeouts
from genserve.client.enums import KvPolicy, PauseMode, PushAction
from genserve.client.generation import AbortResult
from genserve.client.lora import Lora
from genserve.client.many import ManyItem, ManyStream
from genserve.client.pull import PulledWeights
from genserve.client.push import Applied, Push, PushProgress, PushResult
from genserve.client.requests import GenerateOptions, PromptLike
from genserve.client.results import (
    Delta,
    Finish,
    GeneratedSequence,
    Generation,
    Logprobs,
    Prompt,
    SequenceDelta,
    Usage,
    WeightSpan,
)
from genserve.client.safetensors_file import CheckpointFileError
from genserve.client.state import EngineState, Limits, Load, PauseLease, PauseResult, ResumeResult, ServerInfo, Status
from genserve.client.stream import ResponseStream
from genserve.client.sync import Client
from genserve.client.transfer import FinishedUpdate, StartedUpdate
from genserve.client.weights import ServedTensor, ServedWeights
from genserve.errors import UnavailableError

__all__ = [
    "AbortResult",
    "Applied",
    "AsyncClient",
    "CheckpointFileError",
    "Client",
    "ConnectionSettings",
    "Delta",
    "EngineState",
    "Finish",
    "FinishedUpdate",
    "GenerateOptions",
    "GeneratedSequence",
    "Generation",
    "KvPolicy",
    "Limits",
    "Load",
    "Logprobs",
    "Lora",
    "ManyItem",
    "ManyStream",
    "PauseLease",
    "PauseMode",
    "PauseResult",
    "Prompt",
    "PromptLike",
    "PulledWeights",
    "Push",
    "PushAction",
    "PushProgress",
    "PushResult",
    "ResponseStream",
    "ResumeResult",
    "SequenceDelta",
    "ServedTensor",
    "ServedWeights",
    "ServerInfo",
    "StartedUpdate",
    "Status",
    "Timeouts",
    "UnavailableError",
    "Usage",
    "WeightSpan",
]
