"""WeightService."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from genserve.control.membership import FleetCommit
from genserve.control.pause import PauseController
from genserve.control.state import StateBoard
from genserve.engine.protocol import Engine
from genserve.engine.types import WeightDigest
from genserve.errors import DeadlineError, GenserveError
from genserve.ingest.relay import ACK_PATH_KEY, FAILED, METHOD, OUTCOME, PATH_KEY
from genserve.memory.daemon_processes import DaemonProcesses
from genserve.observe.trace import step
from genserve.rpc.convert.control import fleet_record
from genserve.rpc.convert.values import to_state
from genserve.rpc.convert.vllm_transfer import (
    call_timeout_s,
    init_info,
    update_info,
    update_options,
)
from genserve.rpc.convert.weights import (
    apply_options,
    load_of,
    push_header,
    to_applied,
    to_digests,
    to_push,
)
from genserve.rpc.frames.peer import PeerSource
from genserve.rpc.frames.pull import Pullable, pull_frames
from genserve.rpc.frames.push import Frames, read_chunks, read_header
from genserve.rpc.services import router_id_of
from genserve.rpc.status import known_error, to_message
from genserve.security.caller import Caller
from genserve.v1 import weights_pb2
from genserve.v1.weights_pb2_grpc import WeightServiceServicer
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.digests import LiveDigests
from genserve.weights.kept.keeper import Keeper
from genserve.weights.load.loader import WeightLoader
from genserve.weights.lora.files import PulledLora
from genserve.weights.push.pulled_push import PulledPush
from genserve.weights.push.segments import OwnRing, SegmentRules
from genserve.weights.push.stream import until_expired
from genserve.weights.push_admission import check_num_tensors
from genserve.weights.registry import PushRegistry
from genserve.weights.resident import ResidentStore
from genserve.weights.vllm_transfer import TransferUpdates
from genserve.wire.conversions import manifest_message

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

PULL_WRITE_TIMEOUT_S = 60.0
_MIN_HEADER_BYTES = 256 << 10
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class WeightServicer(WeightServiceServicer):
    """Receives weights for the push registry. Without a `checkpoint`, GetWeights returns no manifest."""

    def __init__(
        self,
        pushes: PushRegistry,
        resident: ResidentStore,
        transfers: TransferUpdates,
        engine: Engine,
        pauses: PauseController,
        board: StateBoard,
        checkpoint: CheckpointIndex | None,
        processes: DaemonProcesses,
        peers: Caller,
        keeper: Keeper | None,
        *,
        takes_segments: bool,
    ) -> None:
        self._pushes = pushes
        self._resident = resident
        self._transfers = transfers
        self._engine = engine
        self._digests = LiveDigests(engine, pauses, board)
        self._board = board
        self._membership = board.membership
        self._processes = processes
        self._peers = peers
        self._takes_segments = takes_segments
        self._check_num_tensors = partial(check_num_tensors, checkpoint=checkpoint)
        # Made once: it takes long for a large model, and anybody may ask for it.
        self._manifest = manifest_message(checkpoint.as_manifest()) if checkpoint is not None else None
        self._loader = WeightLoader(pushes, self._peer, keeper)

    @property
    def max_header_bytes(self) -> int | None:
        """Size above which the header of a push is too large; None if the checkpoint is unknown."""
        if self._manifest is None:
            return None
        # Four times: an adapter has two tensors for each, with longer names; then there are names of tied tensors,
        # other layouts, an unknown tensor or two that deserve a proper answer.
        return _MIN_HEADER_BYTES + 4 * self._manifest.ByteSize()

    async def PushWeights(  # type: ignore[override]  # its frames are typed by `frame_parser`
        self, request_iterator: Frames, context: "ServicerContext[Any, Any]", ring: OwnRing | None = None
    ) -> weights_pb2.PushWeightsResponse:
        """Stages the chunks of a stream and answers with the outcome of the push. `ring`: the only memory of a stream
        that a receiving process passes on."""
        frames = aiter(request_iterator)
        header = await read_header(frames)
        if header.HasField("manifest"):
            self._check_num_tensors(len(header.manifest.tensors), lora=header.HasField("lora"))
        # A manifest of a large model takes long to convert: token streams must not wait for it.
        stream = await self._pushes.open(await asyncio.to_thread(push_header, header))
        try:
            async with until_expired(stream):
                with step("receive"):
                    peer = context.peer() if self._takes_segments else ""
                    await read_chunks(frames, stream, SegmentRules(peer, self._processes, ring))
            outcome = await stream.finish()
        finally:
            stream.detach()
        return weights_pb2.PushWeightsResponse(
            push=to_push(outcome.push), applied=to_applied(outcome.applied), state=to_state(self._board.state())
        )

    async def relayed_push(self, request_iterator: Frames, context: "ServicerContext[Any, bytes]") -> None:
        """PushWeights as a receiving process passes it on: segments lie in the memory of that process alone. Its
        clients may be anywhere. Callers are trusted to be such a process: register it where nobody else can call it."""
        metadata = dict(context.invocation_metadata() or ())
        ring = OwnRing(str(metadata.get(PATH_KEY, "")), str(metadata.get(ACK_PATH_KEY, "")))
        try:
            outcome = await self.PushWeights(request_iterator, context, ring)
            answer = OUTCOME + outcome.SerializeToString()
        except (GenserveError, DecodeError) as error:
            failure = to_message(known_error(error, METHOD))
            answer = FAILED + failure.SerializeToString()
            context.set_code(_CODES[failure.code])  # for those who count calls; the client gets the code in the message
        await context.write(answer)

    async def GetPush(
        self, request: weights_pb2.GetPushRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.GetPushResponse:
        """How far a push has come."""
        outcome = self._pushes.report(request.push_id)
        return weights_pb2.GetPushResponse(
            push=to_push(outcome.push), applied=to_applied(outcome.applied), state=to_state(self._board.state())
        )

    async def LoadWeights(
        self, request: weights_pb2.LoadWeightsRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.LoadWeightsResponse:
        """Fetches a version, and answers with the outcome of its push."""
        outcome = await self._loader.load(load_of(request, self._for_fleet(request, context)))
        return weights_pb2.LoadWeightsResponse(
            push=to_push(outcome.push), applied=to_applied(outcome.applied), state=to_state(self._board.state())
        )

    def _peer(self, address: str, push_id: str) -> PeerSource:
        return PeerSource(self._peers, address, push_id, self.max_header_bytes, self._check_num_tensors)

    async def CommitPush(
        self, request: weights_pb2.CommitPushRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.CommitPushResponse:
        """Applies a push that is staged or prepared."""
        outcome = await self._pushes.commit(
            request.push_id,
            apply_options(request.apply, "apply"),
            request.expected_version if request.HasField("expected_version") else None,
            fleet=self._for_fleet(request, context),
        )
        return weights_pb2.CommitPushResponse(
            push=to_push(outcome.push), applied=to_applied(outcome.applied), state=to_state(self._board.state())
        )

    def _for_fleet(
        self,
        request: weights_pb2.CommitPushRequest | weights_pb2.LoadWeightsRequest,
        context: "ServicerContext[Any, Any]",
    ) -> FleetCommit | None:
        """The fleet that commits the version; None if no router asks. Raises as `FleetCommit.check`."""
        if not request.HasField("fleet"):
            return None
        fleet = FleetCommit(self._membership, router_id_of(context), fleet_record(request.fleet))
        fleet.check()
        return fleet

    async def DiscardPush(
        self, request: weights_pb2.DiscardPushRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.DiscardPushResponse:
        """Frees what is staged."""
        outcome = self._pushes.discard(request.push_id, force=request.force)
        return weights_pb2.DiscardPushResponse(push=to_push(outcome.push), state=to_state(self._board.state()))

    async def GetWeights(
        self, request: weights_pb2.GetWeightsRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.GetWeightsResponse:
        """The served weights."""
        digests: Sequence[WeightDigest] = ()
        weight_version = self._engine.weights.version
        if request.include_digests:
            weight_version, digests = await self._digests.read()
        return weights_pb2.GetWeightsResponse(
            weight_version=weight_version,
            manifest=None if request.omit_manifest else self._manifest,
            digests=to_digests(digests),
            resident=self._resident.served is not None,
            push_id=self._resident.push_id,
            content_digest=self._resident.content_digest,
            state=to_state(self._board.state()),
        )

    async def PullWeights(  # type: ignore[override]  # the stubs know generators only
        self,
        request: weights_pb2.PullWeightsRequest,
        context: "ServicerContext[weights_pb2.PullWeightsRequest, bytes]",
    ) -> None:
        """Sends the bytes of the served version, or of a push. Raises DeadlineError for a client that does not read."""
        loaded = [each for each in self._engine.loras.loaded() if each.push_id == request.push_id != ""]
        adapter = await asyncio.to_thread(PulledLora, loaded[0]) if loaded else None
        with self._pulled(request.push_id) if adapter is None else nullcontext(adapter) as pulled:
            async with aclosing(pull_frames(request, pulled)) as frames:
                async for frame in frames:
                    try:
                        async with asyncio.timeout(PULL_WRITE_TIMEOUT_S):
                            await context.write(frame)
                    except TimeoutError:
                        raise DeadlineError(f"the client did not read for {PULL_WRITE_TIMEOUT_S:g} s") from None

    @contextmanager
    def _pulled(self, push_id: str) -> Iterator[Pullable]:
        served = self._resident.served
        if not push_id or (served is not None and served.push_id == push_id):
            with self._resident.reading() as version:
                yield version
        else:
            yield PulledPush(self._pushes.live.find(push_id), self._resident)

    async def InitWeightTransfer(
        self, request: weights_pb2.InitWeightTransferRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.InitWeightTransferResponse:
        """Sets up vLLM's own transfer engine."""
        backend = await self._transfers.init(init_info(request), call_timeout_s(request))
        return weights_pb2.InitWeightTransferResponse(backend=backend, state=to_state(self._board.state()))

    async def StartWeightUpdate(
        self, request: weights_pb2.StartWeightUpdateRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.StartWeightUpdateResponse:
        """Pauses the engine for an update through vLLM's transfer engine."""
        update = await self._transfers.start(update_options(request))
        return weights_pb2.StartWeightUpdateResponse(
            update_id=update.update_id,
            requests_kept=update.hold.kept,
            requests_aborted=update.hold.aborted,
            state=to_state(self._board.state()),
        )

    async def UpdateWeights(
        self, request: weights_pb2.UpdateWeightsRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.UpdateWeightsResponse:
        """Has the workers receive tensors of the update."""
        # Names and shapes of a large model take long to parse: see `PushWeights`.
        info = await asyncio.to_thread(update_info, request)
        await self._transfers.update(request.update_id, info, call_timeout_s(request))
        return weights_pb2.UpdateWeightsResponse(state=to_state(self._board.state()))

    async def FinishWeightUpdate(
        self, request: weights_pb2.FinishWeightUpdateRequest, context: "ServicerContext[Any, Any]"
    ) -> weights_pb2.FinishWeightUpdateResponse:
        """Ends an update."""
        version = request.weight_version if request.HasField("weight_version") else None
        applied = await self._transfers.finish(request.update_id, version, call_timeout_s(request), force=request.force)
        return weights_pb2.FinishWeightUpdateResponse(applied=to_applied(applied), state=to_state(self._board.state()))
