"""Keyword arguments of a push: into the header of the push, and into how it is sent. Every option is declared once."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Final, Self, TypedDict

from genserve.client.weights.results import PushProgress, ServedWeights
from genserve.errors import InvalidFieldError
from genserve.transport.fields import build, check_count, check_switch, naming, optional_duration, wire_value
from genserve.v1 import types_pb2, weights_pb2
from genserve.wire.literals import KvPolicy, PauseMode, PrepareMode, PushAction

MIB: Final = 1 << 20
_PEERS: Final = {"addresses": "peers", "push_id": "peer_push_id"}


class ApplyOptions(TypedDict, total=False):
    """How weights that have come are applied."""

    expected_version: int | None
    """Refuse the push unless this version is served."""
    pause_mode: PauseMode | None
    """What happens to requests in the pause; default keep."""
    kv_policy: KvPolicy | None
    """What happens to the KV cache; default recompute."""
    pause_lease_id: str
    """Apply under this lease, and leave the engine paused."""
    apply_timeout_s: float | None
    """Seconds that applying may take; default 300."""
    prepare_mode: PrepareMode | None
    """running (the default): generation stops only for the exchange; paused: from when every byte has arrived, so that
    the version is served soonest: for a trainer that has nothing running."""


class SendOptions(TypedDict, total=False):
    """How bytes reach the daemon."""

    push_id: str
    """Names the push: a repeat answers what the first one answered. Default: a new UUID."""
    shared_memory: bool | None
    """Whether bytes are written to memory from which a daemon on this host copies them, which is several times faster
    than a socket and takes 16 MiB per stream until the client is closed. Default None: where it can be done. True
    raises UnsupportedError or InvalidFieldError where it cannot."""
    rename: Mapping[str, str] | Callable[[str], str] | None
    """From the names that tensors have here to those of the checkpoint: a function, or a mapping. Names that it lacks
    stay; it must have one of the names, unless several callers push. Default None: they are the checkpoint's."""
    finite: bool
    """Whether to look for NaN and infinity first, and to raise ValueError naming the first tensor that has one, before
    anything is sent. It reads all tensors once more. Default False."""
    progress: Callable[[PushProgress], None] | None
    """Called after each chunk, on the event loop; `Client` calls it in the thread that pushes."""


class PushOptions(ApplyOptions, SendOptions, total=False):
    """Every option of `push_weights`."""

    attempt: str
    """Names one attempt at a push. Bytes that another attempt left in the daemon count only once they are sent again.
    Default: a new UUID for a single caller. Several callers send everything again after a broken stream, unless all of
    them are given the same new UUID: then only what is missing."""
    action: PushAction
    """apply (the default); stage: keep the bytes until `commit_push`; prepare: keep them, and build the version beside
    the live one, so that `commit_push` only exchanges the two; validate: check the manifest and send no byte."""
    partial: bool
    """Whether tensors of the checkpoint may be missing: they keep their present values. Default False."""
    force: bool
    """Whether the version may be one that is not above the served one. Default False."""
    staging_ttl_s: float | None
    """Seconds for which bytes are kept that are incomplete or not committed; default 300."""
    prepared_ttl_s: float | None
    """Seconds that a push with `action="prepare"` waits for `commit_push` before it is dropped; default 60."""
    content_digest: str
    """SHA-256 of the contents, as PushHeader in weights.proto defines it: the push fails with ChecksumMismatchError if
    its bytes have another one."""
    layout: ServedWeights | None
    """The answer of `get_weights` to one of several callers that each bring some of the tensors; the same for all."""
    callers: int | None
    """How many make the push together; default: the number of ranks that the DTensors are spread over, else 1."""
    streams: int
    """How many streams each caller sends at once; default 1."""
    chunk_bytes: int
    """Bytes in a message; default 1 MiB."""
    checksum: bool
    """Whether each chunk has its CRC32C; default True. Needs google-crc32c."""


class LoadOptions(ApplyOptions, total=False):
    """Every option of `load_weights`, with the meaning that it has for a push."""

    push_id: str
    """Names the push: a repeat continues what the first one has begun, or answers the same. Default: a new UUID."""
    action: PushAction
    """apply (the default), stage, prepare or validate."""
    force: bool
    """Whether the version may be one that is not above the served one. Default False."""
    staging_ttl_s: float | None
    """The call ends, and the bytes are freed, if nothing new arrives for as many seconds; default 300."""
    prepared_ttl_s: float | None
    """Seconds for which a prepared push waits for its commit; default 60."""
    content_digest: str
    """Refuse other contents: the digest that `Push.content_digest` and `get_weights` report. Default: not compared."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How one caller sends its part of a push."""

    num_callers: int
    num_streams: int
    chunk_bytes: int
    checksum: bool
    progress: Callable[[PushProgress], None] | None

    @classmethod
    def of(cls, options: PushOptions, num_callers: int) -> Self:
        """Raises InvalidFieldError for a count that is no whole number above 0, or a switch that is no bool."""
        delivery = cls(
            num_callers=num_callers,
            num_streams=options.get("streams", 1),
            chunk_bytes=options.get("chunk_bytes", MIB),
            checksum=options.get("checksum", True),
            progress=options.get("progress"),
        )
        check_count(delivery.chunk_bytes, "chunk_bytes")
        check_count(delivery.num_callers, "callers")
        check_count(delivery.num_streams, "streams")
        check_switch(delivery.checksum, "checksum")
        return delivery


def push_header(version: int, options: PushOptions) -> weights_pb2.PushHeader:
    """The header of a push of weights, without tensors. Raises InvalidFieldError."""
    fields = {
        "push_id": options.get("push_id"),
        "weight_version": version,
        "expected_version": options.get("expected_version"),
        "manifest": build(weights_pb2.Manifest, {"partial": options.get("partial")}),
        "action": wire_value(weights_pb2.PushAction, options.get("action", "apply"), "header.action"),
        "apply": apply_message(options, field="header.apply"),
        "staging_ttl": optional_duration(options.get("staging_ttl_s"), "staging_ttl_s"),
        "force": options.get("force"),
        "attempt": options.get("attempt"),
        "prepared_ttl": optional_duration(options.get("prepared_ttl_s"), "prepared_ttl_s"),
        "content_digest": options.get("content_digest"),
    }
    return build(weights_pb2.PushHeader, fields, path="header", options={"weight_version": "version"})


def load_request(
    checkpoint_path: str | PathLike[str],
    peers: Sequence[str],
    peer_push_id: str,
    previous: bool,
    version: int | None,
    options: LoadOptions,
) -> weights_pb2.LoadWeightsRequest:
    """The request for a load. Raises InvalidFieldError."""
    with naming("checkpoint_path"):
        path = os.fspath(checkpoint_path)
    check_switch(previous, "previous")
    if [bool(path), bool(peers), previous].count(True) != 1:
        raise InvalidFieldError.of("checkpoint_path", "give either a checkpoint_path, or peers, or previous=True")
    if peer_push_id and not peers:
        raise InvalidFieldError.of("peer_push_id", "is for peers only")
    of_peers = {"addresses": peers, "push_id": peer_push_id}
    fields = {
        "push_id": options.get("push_id"),
        "weight_version": version,
        "expected_version": options.get("expected_version"),
        "force": options.get("force"),
        "action": wire_value(weights_pb2.PushAction, options.get("action", "apply"), "action"),
        "apply": apply_message(options, field="apply"),
        "checkpoint_path": path or None,
        "peers": build(weights_pb2.WeightPeers, of_peers, path="peers", options=_PEERS) if peers else None,
        "previous": weights_pb2.PreviousVersion() if previous else None,
        "staging_ttl": optional_duration(options.get("staging_ttl_s"), "staging_ttl_s"),
        "prepared_ttl": optional_duration(options.get("prepared_ttl_s"), "prepared_ttl_s"),
        "content_digest": options.get("content_digest"),
    }
    return build(weights_pb2.LoadWeightsRequest, fields, options={"weight_version": "version"})


def apply_message(options: ApplyOptions, *, field: str) -> weights_pb2.ApplyOptions:
    """The message; None leaves it to the daemon. `field` is its path in the request."""
    fields = {
        "pause_mode": wire_value(types_pb2.PauseMode, options.get("pause_mode"), f"{field}.pause_mode"),
        "kv_policy": wire_value(types_pb2.KvPolicy, options.get("kv_policy"), f"{field}.kv_policy"),
        "pause_lease_id": options.get("pause_lease_id"),
        "timeout": optional_duration(options.get("apply_timeout_s"), f"{field}.apply_timeout_s"),
        "prepare_mode": wire_value(weights_pb2.PrepareMode, options.get("prepare_mode"), f"{field}.prepare_mode"),
    }
    return build(weights_pb2.ApplyOptions, fields, path=field)
