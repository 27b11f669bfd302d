"""Client for a genserve daemon: `AsyncClient` for asyncio, `Client` for everything else.

Importing this module loads grpc and protobuf, but not torch, numpy or vllm.
"""

import os

# Set before grpc is imported, which reads it once. With its fork handlers gRPC 1.85 crashes one in ten children that
# are forked during a call and start a thread, as the workers of a data loader do. Set it to 1 if you need the handlers.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from genserve.client.async_client import AsyncClient
from genserve.client.control import HeldPause
from genserve.client.direct.settings import Direct
from genserve.client.fleet import FleetReplica, Replicas
from genserve.client.generation.calls import AbortResult, CompletedStream
from genserve.client.generation.many import ManyItem, ManyStream
from genserve.client.generation.options import GenerateOptions, PromptLike
from genserve.client.generation.results import (
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
from genserve.client.state import (
    EngineState,
    Limits,
    Load,
    ModelMemory,
    PauseLease,
    PauseResult,
    Protection,
    PushInFlight,
    ResumeResult,
    ServerInfo,
    Status,
)
from genserve.client.sync_client import BlockingStream, Client
from genserve.client.weights.download import PulledWeights
from genserve.client.weights.lora import Lora
from genserve.client.weights.options import ApplyOptions, LoadOptions, PushOptions, SendOptions
from genserve.client.weights.results import Applied, Push, PushProgress, PushResult, ServedTensor, ServedWeights
from genserve.client.weights.vllm_transfer import FinishedUpdate, StartedUpdate
from genserve.errors import UnavailableError
from genserve.tensors.safetensors import CheckpointFileError
from genserve.transport.errors import ClientClosedError, ClientMisuseError
from genserve.transport.settings import ConnectionSettings
from genserve.transport.streams import ResponseStream
from genserve.transport.timeouts import Timeouts
from genserve.wire.literals import KvPolicy, PauseMode, PushAction, SleepTag

__all__ = [
    "AbortResult",
    "Applied",
    "ApplyOptions",
    "AsyncClient",
    "BlockingStream",
    "CheckpointFileError",
    "Client",
    "ClientClosedError",
    "ClientMisuseError",
    "CompletedStream",
    "ConnectionSettings",
    "Delta",
    "Direct",
    "EngineState",
    "Finish",
    "FinishedUpdate",
    "FleetReplica",
    "GenerateOptions",
    "GeneratedSequence",
    "Generation",
    "HeldPause",
    "KvPolicy",
    "Limits",
    "Load",
    "LoadOptions",
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
    "Protection",
    "PulledWeights",
    "Push",
    "PushAction",
    "PushInFlight",
    "PushOptions",
    "PushProgress",
    "PushResult",
    "Replicas",
    "ResponseStream",
    "ResumeResult",
    "SendOptions",
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
