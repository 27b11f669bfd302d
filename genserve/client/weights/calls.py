"""The calls of WeightService."""

import asyncio
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from os import PathLike
from typing import Any, Unpack

from genserve.client.weights.download import Download, PulledWeights
from genserve.client.weights.layout import ByteSpace
from genserve.client.weights.options import (
    MIB,
    ApplyOptions,
    Delivery,
    LoadOptions,
    PushOptions,
    apply_message,
    load_request,
    push_header,
)
from genserve.client.weights.results import Push, PushResult, ServedWeights
from genserve.client.weights.sources import TensorSource, check_finite, num_ranks, tensor_sources
from genserve.client.weights.upload import Upload
from genserve.errors import InvalidFieldError, UnsupportedError
from genserve.memory.host import can_share
from genserve.memory.ring import MIN_BYTES, SpareRings
from genserve.net import is_local
from genserve.tensors.ranges import num_bytes
from genserve.transport import channels
from genserve.transport.connection import UNSET, ServiceCalls, Timeout
from genserve.transport.fields import build, check_count, check_switch, naming, refuse_unknown
from genserve.v1 import weights_pb2
from genserve.v1.control_pb2 import GetServerInfoRequest, GetServerInfoResponse
from genserve.wire.conversions import manifest_message


class WeightCalls(ServiceCalls):
    """Pushes and pulls of weights."""

    async def push_weights(
        self,
        weights: Mapping[str, Any] | str | PathLike[str] | Any,
        *,
        version: int,
        timeout_s: Timeout = UNSET,
        **options: Unpack[PushOptions],
    ) -> PushResult:
        """Streams weights into the daemon, which applies all of them or nothing. `PushOptions` documents the options.

        `weights`: a mapping of checkpoint names to torch tensors or numpy arrays of any shape and type that safetensors
        has a name for, a torch module, also one that is wrapped or has a merged adapter, or the path of a .safetensors
        file or checkpoint directory; see `sources.tensor_sources`. They must not change until this returns. `version`
        must be above the served one unless `force`.

        Several ranks of a trainer make one push together, under the same `push_id`, and all get the outcome. Nothing is
        applied before every byte has arrived. With DTensors (FSDP's fully_shard, tensor parallelism) every rank calls
        this with its own rows, and no collective operation is called. Otherwise each rank brings some of the tensors,
        with the same `layout` (the result of `get_weights` on one rank) and the number of ranks as `callers`. Its
        default is the number of ranks that the DTensors are spread over, else 1. If a rank does not call within
        `timeout_s`, the others get a DeadlineError, which names what that rank did not send. Ranks that bring other
        tensors or versions get a PushConflictError.

        A stream that breaks is resumed with what is missing, a few times within `timeout_s`.

        Raises a `GenserveError` (ManifestMismatchError names the tensors), TypeError or ValueError for weights that
        cannot be sent.
        """
        refuse_unknown(options, PushOptions)
        if isinstance(weights, PulledWeights):
            raise TypeError("weights must not be a PulledWeights: pass its `.tensors`, or its `.state_dict()`")
        header = push_header(version, options)
        # Part of a checkpoint is what its names say: a value that is shared by some of them is the value of each.
        sources = tensor_sources(
            weights,
            tied_once=not header.manifest.partial,
            rename=options.get("rename"),
            is_whole=options.get("callers") in (None, 1),
        )
        return await self._send(sources, header, options, timeout_s)

    async def _send(
        self,
        sources: Sequence[TensorSource],
        header: weights_pb2.PushHeader,
        options: PushOptions,
        timeout_s: Timeout,
    ) -> PushResult:
        """Sends tensors under a header whose manifest, and id if it has none, are added here."""
        finite, shared_memory = options.get("finite", False), options.get("shared_memory")
        check_switch(finite, "finite")
        if shared_memory is not None:
            check_switch(shared_memory, "shared_memory")
        callers = options.get("callers")
        delivery = Delivery.of(options, num_ranks(sources) if callers is None else callers)
        if finite:
            await asyncio.to_thread(check_finite, sources)
        several = delivery.num_callers > 1
        served = options.get("layout")
        with naming("layout"):
            layout = None if served is None else served.layout()
        if several and not header.push_id:
            raise InvalidFieldError.of("push_id", "is required with several callers: pass the same one to each")
        if several and layout is None and all(source.share is None for source in sources):
            raise InvalidFieldError.of("layout", "is required with several callers: each knows only its own tensors")
        space = ByteSpace(sources, layout)
        manifest = space.manifest(partial=header.manifest.partial)
        header.manifest.CopyFrom(manifest_message(manifest))
        header.manifest_digest = manifest.digest
        header.push_id = header.push_id or str(uuid.uuid4())
        if not several:
            header.attempt = header.attempt or str(uuid.uuid4())
        timeout_s = self._connection.grpc_timeout_s(timeout_s, self._connection.timeouts.push_s)
        sends = header.action != weights_pb2.PUSH_ACTION_VALIDATE
        if not sends:
            delivery = replace(delivery, num_callers=1, num_streams=1)
        info = await self._info(num_bytes(space.ranges) if sends else 0, shared_memory, timeout_s)
        rings = None
        if shared_memory is not False and info is not None and sends:
            rings = self._shared(info.host_id, required=shared_memory is True)
        ingest_ports = info.ingest_ports if info is not None and rings is None else ()
        upload = Upload(
            self._connection, header, space, delivery, rings=rings, ingest_ports=ingest_ports, timeout_s=timeout_s
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
        """What the daemon says about faster ways to send, if the push is large enough to ask."""
        may_share = shared_memory is None and is_local(self._connection.target) and own_bytes >= MIN_BYTES
        if shared_memory or may_share or own_bytes >= channels.PUSH_MIN_BYTES:
            limits_s = [each for each in (timeout_s, self._connection.timeouts.control_s) if each is not None]
            request, limit_s = GetServerInfoRequest(), min(limits_s, default=None)
            return await self._connection.unary(self._connection.control.GetServerInfo, request, limit_s)
        return None

    def _shared(self, host_id: str, *, required: bool) -> SpareRings | None:
        """Rings of shared memory, if the daemon can read them. Raises UnsupportedError if they are `required` and it
        cannot."""
        if can_share(self._connection.target, host_id) and hasattr(os, "memfd_create"):
            return self._rings
        if required:
            raise UnsupportedError(
                "the daemon cannot use this process's shared memory: it runs elsewhere, as another user, or with "
                "--no-shared-memory"
            )
        return None

    async def get_push(self, push_id: str, *, timeout_s: Timeout = UNSET) -> PushResult:
        """Progress and outcome of a push, and the byte ranges it misses. Raises PushNotFoundError."""
        request = build(weights_pb2.GetPushRequest, {"push_id": push_id})
        response = await self._connection.unary(self._connection.weights.GetPush, request, timeout_s)
        return PushResult.of(response)

    async def commit_push(
        self, push_id: str, *, timeout_s: Timeout = UNSET, **options: Unpack[ApplyOptions]
    ) -> PushResult:
        """Applies a push that was sent with `action="stage"`, or exchanges one that was sent with `action="prepare"`;
        `ApplyOptions` documents the options. A repeat answers the same. Raises PushNotFoundError, and as
        `push_weights`."""
        refuse_unknown(options, ApplyOptions)
        fields = {
            "push_id": push_id,
            "apply": apply_message(options, field="apply"),
            "expected_version": options.get("expected_version"),
        }
        request = build(weights_pb2.CommitPushRequest, fields)
        timeout_s = self._connection.grpc_timeout_s(timeout_s, self._connection.timeouts.push_s)
        response = await self._connection.unary(self._connection.weights.CommitPush, request, timeout_s)
        return PushResult.of(response)

    async def load_weights(
        self,
        checkpoint_path: str | PathLike[str] = "",
        *,
        peers: Sequence[str] = (),
        peer_push_id: str = "",
        previous: bool = False,
        version: int | None = None,
        timeout_s: Timeout = UNSET,
        **options: Unpack[LoadOptions],
    ) -> PushResult:
        """Makes the daemon fetch weights itself, and applies all of them or nothing, as a push. `LoadOptions` documents
        the options.

        From the absolute `checkpoint_path` of a directory or a .safetensors file on the daemon's host; or from `peers`,
        other daemons at "HOST:PORT", in order of preference: from their push `peer_push_id`, which may still be
        arriving there, or what they serve. Or with `previous`, the version before the served one, as --keep-committed
        has it on the daemon's disk; give `force=True`, if its number is not above the served one. `version` may be left
        out with peers and `previous`: it is the one that is there.

        If this call ends early, the bytes stay staged, and a call with the same `push_id` continues. Raises
        PeersFailedError, PushNotFoundError if the push is discarded meanwhile or nothing new arrives for its
        `staging_ttl_s`, UnsupportedError and NotResidentError if no previous version is kept, and as `push_weights`.
        """
        refuse_unknown(options, LoadOptions)
        request = load_request(checkpoint_path, peers, peer_push_id, previous, version, options)
        timeout_s = self._connection.grpc_timeout_s(timeout_s, self._connection.timeouts.push_s)
        response = await self._connection.unary(self._connection.weights.LoadWeights, request, timeout_s)
        return PushResult.of(response)

    async def discard_push(self, push_id: str, *, force: bool = False, timeout_s: Timeout = UNSET) -> Push:
        """Frees a staged or prepared push; with `force` even while somebody sends it, whose push ends with
        PushNotFoundError.

        Raises PushNotFoundError, and ApplyInProgressError while the push is being applied or sent.
        """
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
        """Returns all served weights, in memory. `version` refuses unless that version is served.

        Another daemon catches up with `push_weights(pulled.tensors, version=pulled.weight_version)`. If the stream
        breaks, it continues where it broke, a few times within `timeout_s`. `progress` gets the number of bytes so far
        and of all bytes.

        Raises NotResidentError, ChecksumMismatchError, and WeightVersionMismatchError, also if the version is replaced
        meanwhile and its memory is reused.
        """
        check_count(chunk_bytes, "chunk_bytes")
        timeout_s = self._connection.grpc_timeout_s(timeout_s, self._connection.timeouts.push_s)
        return await Download(self._connection, version, chunk_bytes, progress, timeout_s).run()

    async def get_weights(self, *, include_digests: bool = False, timeout_s: Timeout = UNSET) -> ServedWeights:
        """The served version, the tensors a push must bring and, on request, digests of the live weights (seconds)."""
        request = build(weights_pb2.GetWeightsRequest, {"include_digests": include_digests})
        response = await self._connection.unary(self._connection.weights.GetWeights, request, timeout_s)
        return ServedWeights.of(response)
