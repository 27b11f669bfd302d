"""Services of a daemon that do what a test tells them, behind a real gRPC server: for what a client must survive."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from genserve.client import AsyncClient
from genserve.errors import DOMAIN
from genserve.v1 import (
    control_pb2,
    control_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    types_pb2,
    weights_pb2,
    weights_pb2_grpc,
)
from tests.support.patience import slow


async def refuse(context: Any, code: int, reason: str, message: str, *details: Message, **metadata: str) -> None:
    """Ends a call as the daemon does: a code, an ErrorInfo and further details."""
    status = status_pb2.Status(code=code, message=message)
    for detail in (error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata), *details):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    await context.abort_with_status(rpc_status.to_status(status))


class ScriptedDaemon(
    generation_pb2_grpc.GenerationServiceServicer,
    weights_pb2_grpc.WeightServiceServicer,
    control_pb2_grpc.ControlServiceServicer,
):
    """Answers from plain attributes, which tests set, and remembers what it was asked."""

    def __init__(self) -> None:
        self.target = ""
        self.health = health.aio.HealthServicer()
        self.metadata: dict[str, str | bytes] = {}
        self.remaining_s: float | None = None
        # Generate
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.tokenized: list[generation_pb2.TokenizeRequest] = []
        self.words: Sequence[str] = ("Once", " upon", " a", " time")
        self.finish_reason = generation_pb2.FINISH_REASON_LENGTH
        self.hangs_after: int | None = None
        self.delay_s = 0.0
        self.hanging, self.goes_on, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.fail: Callable[[Any], Any] | None = None
        self.weight_version, self.header = 0, weights_pb2.PushHeader()
        self.staged: dict[str, dict[int, bytes]] = {}
        self.streams: list[list[tuple[int, int]]] = []
        self.cut_after_bytes: list[int] = []
        self.breaks_streams = False  # each one, as soon as its header has come
        self.loses_answer = self.dies_when_complete = False
        self.state_of_push = weights_pb2.PUSH_STATE_UNSPECIFIED  # of one that is not applied
        self.lookups_hang, self.num_lost_lookups, self.num_lookups = False, 0, 0
        self.forgets_at_lookup = 0
        self.checksums: list[bool] = []
        self.applied = asyncio.Event()
        self.load = weights_pb2.LoadWeightsRequest()
        # vLLM's own weight transfer
        self.transfers: list[Message] = []
        # Pause, watch, sleep
        self.pauses: list[control_pb2.PauseRequest] = []
        self.leases: dict[str, types_pb2.PauseLease] = {}
        self.renewals_hang, self.renewed = False, asyncio.Event()
        self.resumed: list[str] = []
        self.watches: list[control_pb2.WatchStatusRequest] = []
        self.info = control_pb2.GetServerInfoResponse(model="smol", vocab_size=512, weight_update="beside")
        self.info.weight_update_reason = "there is room"
        self.info.versions.add(component="vllm", version="1")
        self.sleeps: list[Message] = []
        self.asleep_tags: list[str] = []

    def state(self) -> types_pb2.EngineState:
        phase = types_pb2.PHASE_PAUSED if self.leases else types_pb2.PHASE_RUNNING
        return types_pb2.EngineState(
            instance_id="i",
            weight_version=self.weight_version,
            phase=types_pb2.PHASE_SLEEPING if self.asleep_tags else phase,
            pauses=self.leases.values(),
            asleep_tags=self.asleep_tags,
            weights_discarded=bool(self.asleep_tags),
        )

    async def _begin(self, context: Any) -> None:
        self.metadata = dict(context.invocation_metadata())
        remaining_s = context.time_remaining()
        self.remaining_s = None if remaining_s is None or remaining_s > 1e6 else remaining_s
        if self.fail is not None:
            await self.fail(context)

    # --- generation

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        # While a response is being sent, gRPC cancels itself and not what has made the response.
        context.add_done_callback(lambda ended: self.cancelled.set() if ended.cancelled() else None)
        await self._begin(context)
        lora = len(request.lora_name)  # the version of an adapter
        spans = [types_pb2.WeightSpan(version=v, start=2 * v, end=2 * v + 2, lora_version=lora) for v in (0, 1)]
        try:
            for position, word in enumerate(self.words):
                if self.hangs_after == position:
                    self.hanging.set()
                    await self.goes_on.wait()
                    self.goes_on.clear()
                await slow(self.delay_s)
                version, last = int(position >= 2), position == len(self.words) - 1
                delta = generation_pb2.SequenceDelta(
                    text=word,
                    token_ids=[position],
                    weight_spans=[types_pb2.WeightSpan(version=version, start=position, end=position + 1)],
                    logprobs=types_pb2.Logprobs(sampled=[-0.5], ranks=[1], width=1, token_ids=[7], values=[-0.5]),
                )
                response = generation_pb2.GenerateResponse(outputs=[delta])
                if position == 0:
                    response.request_id = request.request_id or "minted"
                    response.prompt.num_tokens = 3
                if last:
                    response.outputs[0].finish.CopyFrom(
                        generation_pb2.Finish(reason=self.finish_reason, num_tokens=len(self.words), weight_spans=spans)
                    )
                    response.usage.num_output_tokens = len(self.words)
                yield response
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Abort(self, request: Any, context: Any) -> generation_pb2.AbortResponse:
        return generation_pb2.AbortResponse(aborted_ids=request.request_ids[:1], unknown_ids=request.request_ids[1:])

    async def Tokenize(self, request: Any, context: Any) -> generation_pb2.TokenizeResponse:
        self.tokenized.append(request)
        return generation_pb2.TokenizeResponse(token_ids=[len(word) for word in request.text.split()])

    async def Detokenize(self, request: Any, context: Any) -> generation_pb2.DetokenizeResponse:
        return generation_pb2.DetokenizeResponse(text=" ".join(map(str, request.token_ids)))

    # --- weights

    async def PushWeights(self, frames: Any, context: Any) -> weights_pb2.PushWeightsResponse:
        await self._begin(context)
        ranges: list[tuple[int, int]] = []
        self.streams.append(ranges)
        async for frame in frames:
            match frame.WhichOneof("frame"):
                case "header":
                    if frame.header.HasField("manifest"):  # only one of several streams brings it
                        self.header = frame.header
                    chunks = self.staged.setdefault(frame.header.push_id, {})
                    if self.breaks_streams:
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                case "chunk":
                    chunk = frame.chunk
                    self.checksums.append(chunk.HasField("crc32c"))
                    chunks[chunk.offset] = max(chunk.data, chunks.get(chunk.offset, b""), key=len)
                    ranges.append((chunk.offset, chunk.offset + len(chunk.data)))
                    if self.cut_after_bytes and sum(map(len, chunks.values())) >= self.cut_after_bytes[0]:
                        self.cut_after_bytes.pop(0)
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                case "end":
                    break
        else:
            await refuse(context, code_pb2.ABORTED, "PUSH_TRUNCATED", "there was no end frame")
        if self.header.action == weights_pb2.PUSH_ACTION_VALIDATE:
            push = weights_pb2.Push(push_id=self.header.push_id, state=weights_pb2.PUSH_STATE_VALID)
            return weights_pb2.PushWeightsResponse(push=push, state=self.state())
        if self._missing():
            await refuse(context, code_pb2.ABORTED, "PUSH_TRUNCATED", "bytes are missing")
        if self.dies_when_complete:
            del self.staged[self.header.push_id]
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if self.state_of_push:
            push = weights_pb2.Push(push_id=self.header.push_id, state=self.state_of_push)
            return weights_pb2.PushWeightsResponse(push=push, state=self.state())
        self.weight_version = self.header.weight_version
        self.applied.set()
        if self.loses_answer:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return weights_pb2.PushWeightsResponse(push=self._push(), applied=self._applied(), state=self.state())

    async def LoadWeights(self, request: Any, context: Any) -> weights_pb2.LoadWeightsResponse:
        self.load = request
        return weights_pb2.LoadWeightsResponse(push=self._push(), applied=self._applied(), state=self.state())

    async def GetPush(self, request: Any, context: Any) -> weights_pb2.GetPushResponse:
        self.num_lookups += 1
        if self.num_lookups == self.forgets_at_lookup:
            self.staged.clear()
        if self.lookups_hang:
            await asyncio.Event().wait()
        if self.num_lost_lookups:
            self.num_lost_lookups -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if request.push_id not in self.staged:
            await refuse(context, code_pb2.NOT_FOUND, "PUSH_NOT_FOUND", f"no push {request.push_id}")
        response = weights_pb2.GetPushResponse(push=self._push(), state=self.state())
        if self.applied.is_set():
            response.applied.CopyFrom(self._applied())
        return response

    async def GetWeights(self, request: Any, context: Any) -> weights_pb2.GetWeightsResponse:
        digests = [weights_pb2.WeightDigest(rank="tp0", name="w", sha256="00")] if request.include_digests else []
        return weights_pb2.GetWeightsResponse(
            weight_version=self.weight_version, manifest=self.header.manifest, digests=digests, state=self.state()
        )

    async def InitWeightTransfer(self, request: Any, context: Any) -> weights_pb2.InitWeightTransferResponse:
        await self._begin(context)
        self.transfers.append(request)
        return weights_pb2.InitWeightTransferResponse(backend="nccl", state=self.state())

    async def StartWeightUpdate(self, request: Any, context: Any) -> weights_pb2.StartWeightUpdateResponse:
        await self._begin(context)
        self.transfers.append(request)
        return weights_pb2.StartWeightUpdateResponse(update_id="u1", requests_kept=3, state=self.state())

    async def UpdateWeights(self, request: Any, context: Any) -> weights_pb2.UpdateWeightsResponse:
        await self._begin(context)
        self.transfers.append(request)
        return weights_pb2.UpdateWeightsResponse(state=self.state())

    async def FinishWeightUpdate(self, request: Any, context: Any) -> weights_pb2.FinishWeightUpdateResponse:
        await self._begin(context)
        self.transfers.append(request)
        self.weight_version = request.weight_version
        applied = weights_pb2.Applied(active_version=request.weight_version)
        return weights_pb2.FinishWeightUpdateResponse(applied=applied, state=self.state())

    def pushed_bytes(self) -> bytes:
        """The byte space as it was received."""
        space = bytearray(self.header.manifest.total_bytes)
        for offset, data in self.staged[self.header.push_id].items():
            space[offset : offset + len(data)] = data
        return bytes(space)

    def _missing(self) -> list[weights_pb2.ByteRange]:
        missing, position = [], 0
        for offset, data in sorted(self.staged[self.header.push_id].items()):
            if offset > position:
                missing.append(weights_pb2.ByteRange(start=position, end=offset))
            position = max(position, offset + len(data))
        if position < self.header.manifest.total_bytes:
            missing.append(weights_pb2.ByteRange(start=position, end=self.header.manifest.total_bytes))
        return missing

    def _push(self) -> weights_pb2.Push:
        received = weights_pb2.PUSH_STATE_RECEIVING
        return weights_pb2.Push(
            push_id=self.header.push_id,
            state=weights_pb2.PUSH_STATE_APPLIED if self.applied.is_set() else received,
            weight_version=self.header.weight_version,
            total_bytes=self.header.manifest.total_bytes,
            missing=self._missing(),
            attempt=self.header.attempt,
        )

    def _applied(self) -> weights_pb2.Applied:
        steps = [
            weights_pb2.StepTiming(step=step, duration=Duration(nanos=1_500_000)) for step in ("receive", "commit")
        ]
        return weights_pb2.Applied(
            active_version=self.header.weight_version,
            timings=steps,
            paused=Duration(nanos=10**6),
            recomputed_tokens=512,
        )

    # --- control

    async def Pause(self, request: Any, context: Any) -> control_pb2.PauseResponse:
        await self._begin(context)
        self.pauses.append(request)
        mode = request.mode or types_pb2.PAUSE_MODE_KEEP
        lease = types_pb2.PauseLease(lease_id="lease-1", holder=request.holder, mode=mode)
        if not request.no_expiry:
            lease.expire_time.FromSeconds(4_000_000_000)
        self.leases[lease.lease_id] = lease
        return control_pb2.PauseResponse(lease=lease, requests_kept=2, state=self.state())

    async def RenewPause(self, request: Any, context: Any) -> control_pb2.RenewPauseResponse:
        await self._need_lease(request.lease_id, context)
        if self.renewals_hang:
            await asyncio.Event().wait()
        self.renewed.set()
        return control_pb2.RenewPauseResponse(lease=self.leases[request.lease_id], state=self.state())

    async def Resume(self, request: Any, context: Any) -> control_pb2.ResumeResponse:
        if request.force:
            self.leases.clear()
        else:
            await self._need_lease(request.lease_id, context)
            del self.leases[request.lease_id]
        self.resumed.append(request.lease_id)
        return control_pb2.ResumeResponse(state=self.state())

    async def _need_lease(self, lease_id: str, context: Any) -> None:
        if lease_id not in self.leases:
            self.renewed.set()
            await refuse(context, code_pb2.FAILED_PRECONDITION, "PAUSE_LEASE_LOST", f"no lease {lease_id}")

    async def Sleep(self, request: Any, context: Any) -> control_pb2.SleepResponse:
        await self._begin(context)
        self.sleeps.append(request)
        self.asleep_tags = ["scheduling", "weights", "kv_cache"]
        return control_pb2.SleepResponse(state=self.state())

    async def WakeUp(self, request: Any, context: Any) -> control_pb2.WakeUpResponse:
        await self._begin(context)
        self.sleeps.append(request)
        left = [tag for tag in self.asleep_tags[1:] if request.tags and tag not in request.tags]
        self.asleep_tags = ["scheduling", *left] if left else []
        return control_pb2.WakeUpResponse(state=self.state())

    async def GetStatus(self, request: Any, context: Any) -> control_pb2.GetStatusResponse:
        await self._begin(context)
        return control_pb2.GetStatusResponse(state=self.state(), load=control_pb2.Load(running=3, kv_usage=0.25))

    async def WatchStatus(self, request: Any, context: Any) -> AsyncIterator[control_pb2.WatchStatusResponse]:
        self.watches.append(request)
        for running in range(2):
            yield control_pb2.WatchStatusResponse(state=self.state(), load=control_pb2.Load(running=running))

    async def GetServerInfo(self, request: Any, context: Any) -> control_pb2.GetServerInfoResponse:
        self.info.state.CopyFrom(self.state())
        return self.info

    async def ResetCache(self, request: Any, context: Any) -> control_pb2.ResetCacheResponse:
        return control_pb2.ResetCacheResponse(reset=True, state=self.state())


@asynccontextmanager
async def running_daemon(
    address: str = "127.0.0.1:0", daemon: ScriptedDaemon | None = None
) -> AsyncIterator[ScriptedDaemon]:
    """A scripted daemon that listens at `address`; its `target` is where."""
    daemon = ScriptedDaemon() if daemon is None else daemon
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(daemon, server)
    weights_pb2_grpc.add_WeightServiceServicer_to_server(daemon, server)
    control_pb2_grpc.add_ControlServiceServicer_to_server(daemon, server)
    health_pb2_grpc.add_HealthServicer_to_server(daemon.health, server)
    await daemon.health.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port(address)
    daemon.target = address if address.startswith("unix:") else f"127.0.0.1:{port}"
    await server.start()
    try:
        yield daemon
    finally:
        await server.stop(grace=None)


@pytest.fixture
async def daemon() -> AsyncIterator[ScriptedDaemon]:
    async with running_daemon() as daemon:
        yield daemon


@pytest.fixture
async def client(daemon: ScriptedDaemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.target) as client:
        yield client
