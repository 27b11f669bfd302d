"""The calls of WeightService."""

import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Any

from genserve.client.control.state import EngineState
from genserve.client.transport.connection import UNSET, ServiceCalls, Timeout
from genserve.client.transport.enums import KvPolicy, PauseMode, PushAction, wire_value
from genserve.client.transport.fields import build, check_count, naming, optional_duration
from genserve.client.weights import push_channels
from genserve.client.weights.download import Download, PulledWeights
from genserve.client.weights.frames import manifest_message, manifest_of
from genserve.client.weights.layout import ByteSpace
from genserve.client.weights.push import Push, PushProgress, PushResult, Upload
from genserve.client.weights.sources import TensorSource, num_ranks, tensor_sources
from genserve.errors import InvalidFieldError, UnsupportedError
from genserve.memory.host import can_share, is_local
from genserve.memory.ring import MIN_BYTES, SpareRings
from genserve.tensors.dtypes import item_bytes
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import num_bytes
from genserve.v1 import types_pb2, weights_pb2
from genserve.v1.control_pb2 import GetServerInfoRequest, GetServerInfoResponse

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServedTensor:
    """A tensor of the served checkpoint; `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that are served. `digests` is SHA-256 in hex by (rank, name of vLLM's parameter), when asked for;
    `resident`: whether they can be pulled, and completed by partial pushes."""

    weight_version: int
    tensors: list[ServedTensor]
    total_bytes: int
    manifest_digest: str
    digests: dict[tuple[str, str], str]
    resident: bool
    state: EngineState

    def layout(self) -> Manifest:
        """Where the tensors lie in a push of several callers. Raises DtypeError."""
        return Manifest.end_to_end(
            (each.name, each.dtype, each.shape, math.prod(each.shape) * item_bytes(each.name, each.dtype))
            for each in self.tensors
        )


class WeightCalls(ServiceCalls):
    """Weights in, and out again."""

    async def push_weights(
        self,
        weights: Mapping[str, Any] | str | PathLike[str] | Any,
        *,
        version: int,
        expected_version: int | None = None,
        push_id: str = "",
        attempt: str = "",
        action: PushAction = "apply",
        partial: bool = False,
        pause_mode: PauseMode | None = None,
        kv_policy: KvPolicy | None = None,
        pause_lease_id: str = "",
        force: bool = False,
        apply_timeout_s: float | None = None,
        staging_ttl_s: float | None = None,
        layout: ServedWeights | None = None,
        callers: int | None = None,
        streams: int = 1,
        shared_memory: bool | None = None,
        chunk_bytes: int = MIB,
        checksum: bool = True,
        progress: Callable[[PushProgress], None] | None = None,
        timeout_s: Timeout = UNSET,
    ) -> PushResult:
        """Streams weights into the daemon, which applies all of them or nothing.

        `weights`: a mapping of checkpoint names to torch tensors or numpy arrays of any shape and type that safetensors
        has a name for, a torch module, or the path of a .safetensors file or checkpoint directory; see
        `tensors.tensor_sources`. They must not change until this returns.

        `version` must be above the served one unless `force`; `expected_version` refuses unless that one is served;
        `partial` lets tensors be missing; `pause_lease_id` applies under a lease and leaves the engine paused.

        Several ranks of a trainer make one push together, under the same `push_id`, and all get the outcome. Nothing
        is applied before every byte has come. With DTensors (FSDP's fully_shard, tensor parallelism) every rank calls
        this with what it has: it sends its own rows, and no collective operation is called. Otherwise each
        brings some of the tensors, with the same `layout` (what `get_weights` told one of them) and their number as
        `callers`, whose default is the number of ranks that the DTensors are spread over, else 1. A rank that does not
        come within `timeout_s` is a DeadlineError, which names what it has not sent; ranks that bring other tensors
        or versions are a PushConflictError. `streams`: how many of them each caller sends at once.

        `attempt` names one attempt at a push. Bytes that another attempt left in the daemon count only once they are
        sent again; sending different bytes raises PushConflictError and ends the push for all of its callers. A single
        caller gets a new name for each call. With several callers and no `attempt`, all of them send everything again
        after a broken stream; pass the same new UUID on all of them to send again only what is missing.

        `shared_memory`: whether the bytes are written to memory from which a daemon on this host copies them, which is
        several times faster than a socket, and takes 16 MiB a stream until the client is closed. None does it where
        it can; True raises UnsupportedError or InvalidFieldError where it cannot.

        Defaults of the daemon: pause mode keep, KV cache recompute, `apply_timeout_s` 300. A stream that breaks is
        resumed with what is missing, a few times within `timeout_s`. `progress` is called on the event loop after each
        chunk (`Client` calls it in the thread that pushes). A repeat with the same `push_id` answers what it answered;
        one is minted if none is given.

        Raises a `GenserveError` (ManifestMismatchError names the tensors), TypeError or ValueError for weights that
        cannot be sent.
        """
        fields = {
            "push_id": push_id,
            "weight_version": version,
            "expected_version": expected_version,
            "manifest": build(weights_pb2.Manifest, {"partial": partial}),
            "action": wire_value(weights_pb2.PushAction, action, "header.action"),
            "apply": apply_options(pause_mode, kv_policy, pause_lease_id, apply_timeout_s, field="header.apply"),
            "staging_ttl": optional_duration(staging_ttl_s, "staging_ttl_s"),
            "force": force,
            "attempt": attempt,
        }
        header = build(weights_pb2.PushHeader, fields, path="header")
        with naming("layout"):
            tensor_layout = None if layout is None else layout.layout()
        return await self._send(
            tensor_sources(weights),
            header,
            tensor_layout,
            callers=callers,
            streams=streams,
            shared_memory=shared_memory,
            chunk_bytes=chunk_bytes,
            checksum=checksum,
            progress=progress,
            timeout_s=timeout_s,
        )

    async def _send(
        self,
        sources: Sequence[TensorSource],
        header: weights_pb2.PushHeader,
        layout: Manifest | None = None,
        *,
        callers: int | None = None,
        streams: int = 1,
        shared_memory: bool | None = None,
        chunk_bytes: int = MIB,
        checksum: bool = True,
        progress: Callable[[PushProgress], None] | None = None,
        timeout_s: Timeout = UNSET,
    ) -> PushResult:
        """Sends tensors under a header whose manifest, and id if it has none, are added here."""
        if callers is None:
            callers = num_ranks(sources)
        for option, value in (("chunk_bytes", chunk_bytes), ("callers", callers), ("streams", streams)):
            check_count(value, option)
        if callers > 1 and not header.push_id:
            raise InvalidFieldError.of("push_id", "several callers need the same one")
        if callers > 1 and layout is None and all(source.share is None for source in sources):
            raise InvalidFieldError.of("layout", "several callers need the same, as each knows its own tensors only")
        space = ByteSpace(sources, layout)
        header.push_id = header.push_id or str(uuid.uuid4())
        if callers == 1:
            header.attempt = header.attempt or str(uuid.uuid4())
        manifest = space.manifest(partial=header.manifest.partial)
        header.manifest.CopyFrom(manifest_message(manifest))
        header.manifest_digest = manifest.digest
        sends = header.action != weights_pb2.PUSH_ACTION_VALIDATE
        timeout_s = self._connection.deadline_s(timeout_s, self._connection.timeouts.push_s)
        own_bytes = num_bytes(space.ranges) if sends else 0
        info = await self._info(own_bytes, shared_memory, timeout_s)
        rings = None
        if shared_memory is not False and info is not None and sends:
            rings = self._shared(info.host_id, required=shared_memory is True)
        upload = Upload(
            self._connection,
            header,
            space,
            num_streams=streams if sends else 1,
            num_callers=callers if sends else 1,
            rings=rings,
            ingest_ports=info.ingest_ports if info is not None and rings is None else (),
            chunk_bytes=chunk_bytes,
            checksum=checksum,
            progress=progress,
            timeout_s=timeout_s,
        )
        try:
            return await upload.run()
        except InvalidFieldError as error:
            if rings is None or shared_memory or not error.violations[0].field.startswith("segment"):
                raise
            upload.without_rings()
            return await upload.run()

    @cached_property
    def _rings(self) -> SpareRings:
        rings = SpareRings()
        self._connection.on_close(rings.close)
        return rings

    async def _info(
        self, own_bytes: int, shared_memory: bool | None, timeout_s: float | None
    ) -> GetServerInfoResponse | None:
        """What the daemon says of faster ways, if the push is large enough to ask."""
        may_share = shared_memory is None and is_local(self._connection.target) and own_bytes >= MIN_BYTES
        if shared_memory or may_share or own_bytes >= push_channels.MIN_BYTES:
            limits_s = [each for each in (timeout_s, self._connection.timeouts.control_s) if each is not None]
            request, limit_s = GetServerInfoRequest(), min(limits_s, default=None)
            return await self._connection.unary(self._connection.control.GetServerInfo, request, limit_s)
        return None

    def _shared(self, host_id: str, *, required: bool) -> SpareRings | None:
        """Memory to hand over, if the daemon can have it. Raises UnsupportedError when it is `required` and cannot."""
        if can_share(self._connection.target, host_id) and hasattr(os, "memfd_create"):
            return self._rings
        if required:
            raise UnsupportedError(
                "the daemon takes no shared memory from this process: it runs elsewhere, as another user, or with "
                "--no-shared-memory"
            )
        return None

    async def get_push(self, push_id: str, *, timeout_s: Timeout = UNSET) -> PushResult:
        """Progress and outcome of a push, and the byte ranges it misses. Raises PushNotFoundError."""
        request = build(weights_pb2.GetPushRequest, {"push_id": push_id})
        response = await self._connection.unary(self._connection.weights.GetPush, request, timeout_s)
        return PushResult.of(response)

    async def commit_push(
        self,
        push_id: str,
        *,
        expected_version: int | None = None,
        pause_mode: PauseMode | None = None,
        kv_policy: KvPolicy | None = None,
        pause_lease_id: str = "",
        apply_timeout_s: float | None = None,
        timeout_s: Timeout = UNSET,
    ) -> PushResult:
        """Applies a push that was sent with `action="stage"`; options as in `push_weights`. A repeat answers the same.
        Raises PushNotFoundError, and as `push_weights`."""
        fields = {
            "push_id": push_id,
            "apply": apply_options(pause_mode, kv_policy, pause_lease_id, apply_timeout_s, field="apply"),
            "expected_version": expected_version,
        }
        request = build(weights_pb2.CommitPushRequest, fields)
        timeout_s = self._connection.deadline_s(timeout_s, self._connection.timeouts.push_s)
        response = await self._connection.unary(self._connection.weights.CommitPush, request, timeout_s)
        return PushResult.of(response)

    async def discard_push(self, push_id: str, *, force: bool = False, timeout_s: Timeout = UNSET) -> Push:
        """Frees what a push has staged; with `force` also while somebody is sending it, whose push ends with
        PushNotFoundError. Raises PushNotFoundError, and ApplyInProgressError while it is being applied, or sent."""
        request = build(weights_pb2.DiscardPushRequest, {"push_id": push_id, "force": force})
        response = await self._connection.unary(self._connection.weights.DiscardPush, request, timeout_s)
        return Push.of(response.push)

    async def pull_weights(
        self,
        *,
        version: int | None = None,
        chunk_bytes: int = MIB,
        progress: Callable[[int, int], None] | None = None,
        timeout_s: Timeout = UNSET,
    ) -> PulledWeights:
        """The served weights, whole, in memory; `version` refuses unless that one is served.

        Another daemon catches up with `push_weights(pulled.tensors, version=pulled.weight_version)`. A stream that
        breaks goes on where it broke, a few times within `timeout_s`. `progress` gets the number of bytes so far
        and of all. Raises NotResidentError, ChecksumMismatchError, and WeightVersionMismatchError, also when the
        version is replaced meanwhile and its memory is needed.
        """
        check_count(chunk_bytes, "chunk_bytes")
        timeout_s = self._connection.deadline_s(timeout_s, self._connection.timeouts.push_s)
        return await Download(self._connection, version, chunk_bytes, progress, timeout_s).run()

    async def get_weights(self, *, include_digests: bool = False, timeout_s: Timeout = UNSET) -> ServedWeights:
        """The served version, the tensors a push must bring and, on request, digests of the live weights (seconds)."""
        request = build(weights_pb2.GetWeightsRequest, {"include_digests": include_digests})
        response = await self._connection.unary(self._connection.weights.GetWeights, request, timeout_s)
        manifest = manifest_of(response.manifest)
        return ServedWeights(
            weight_version=response.weight_version,
            tensors=[ServedTensor(each.name, each.dtype, each.shape) for each in manifest.tensors],
            total_bytes=manifest.total_bytes,
            manifest_digest=manifest.digest,
            digests={(each.rank, each.name): each.sha256 for each in response.digests},
            resident=response.resident,
            state=EngineState.of(response.state),
        )


def apply_options(
    pause_mode: PauseMode | None,
    kv_policy: KvPolicy | None,
    pause_lease_id: str,
    timeout_s: float | None,
    *,
    field: str,
) -> weights_pb2.ApplyOptions:
    """The message; None leaves it to the daemon. `field` is its path in the request."""
    fields = {
        "pause_mode": wire_value(types_pb2.PauseMode, pause_mode, f"{field}.pause_mode"),
        "kv_policy": wire_value(types_pb2.KvPolicy, kv_policy, f"{field}.kv_policy"),
        "pause_lease_id": pause_lease_id,
        "timeout": optional_duration(timeout_s, f"{field}.apply_timeout_s"),
    }
    return build(weights_pb2.ApplyOptions, fields, path=field)
