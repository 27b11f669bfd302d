"""Client for a genserve daemon: `AsyncClient` for asyncio, `Client` for everything else.

Importing this loads grpc and protobuf, and neither torch, numpy nor vllm.
"""

import os

# Before grpc is imported, which reads it once. With its fork handlers gRPC 1.85 crashes one child in ten that is forked
# while a call is under way and starts a thread, as the workers of a data loader do. Who needs them sets it to 1.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from genserve.client.as_completed import CompletedStream
from genserve.client.async_client import AsyncClient
from genserve.client.channel import ConnectionSettings, Timeouts
from genserve.client.enums import KvPolicy, PauseMode, PushAction, SleepTag
from genserve.client.errors import ClientClosedError, ClientMisuseError
from genserve.client.generation import AbortResult
from genserve.client.lease import HeldPause
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
from genserve.client.state import (
    EngineState,
    Limits,
    Load,
    ModelMemory,
    PauseLease,
    PauseResult,
    ResumeResult,
    ServerInfo,
    Status,
)
from genserve.client.stream import ResponseStream
from genserve.client.sync import BlockingStream, Client
from genserve.client.transfer import FinishedUpdate, StartedUpdate
from genserve.client.weights import ServedTensor, ServedWeights
from genserve.errors import UnavailableError

__all__ = [
    "AbortResult",
    "Applied",
    "AsyncClient",
    "BlockingStream",
    "CheckpointFileError",
    "Client",
    "ClientClosedError",
    "ClientMisuseError",
    "CompletedStream",
    "ConnectionSettings",
    "Delta",
    "EngineState",
    "Finish",
    "FinishedUpdate",
    "GenerateOptions",
    "GeneratedSequence",
    "Generation",
    "HeldPause",
    "KvPolicy",
    "Limits",
    "Load",
    "Logprobs",
    "Lora",
    "ManyItem",
    "ManyStream",
    "ModelMemory",
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
    "SleepTag",
    "StartedUpdate",
    "Status",
    "Timeouts",
    "UnavailableError",
    "Usage",
    "WeightSpan",
]
