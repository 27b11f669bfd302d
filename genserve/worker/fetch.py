"""Bytes of a version, fetched from the daemon to another host: one worker of the host fetches them, and all of
its workers map them.

It uses PullWeights as any client may: chunks with checksums, and after a break the missing bytes.
"""

import threading
import time
from typing import TypeAlias

import grpc

from genserve.aio import Backoff
from genserve.memory.arena import Arena
from genserve.security.caller import Caller
from genserve.security.files import CallerFiles
from genserve.tensors.checksum import crc32c_of
from genserve.tensors.chunk_frame import Chunk, parse_chunk
from genserve.v1 import weights_pb2
from genserve.worker.contract.calls import Fetch, Progress

_CHUNK_BYTES = 4 << 20
_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 2.0
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # the first frame has a manifest
    ("grpc.enable_http_proxy", 0),
    # A daemon that vanishes without closing the connection is noticed before the deadline.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.lookahead_bytes", _CHUNK_BYTES),
)
Pull: TypeAlias = "grpc.UnaryStreamMultiCallable[weights_pb2.PullWeightsRequest, bytes]"
_PULL = "/genserve.v1.WeightService/PullWeights"


class FetchError(Exception):
    """The bytes could not be fetched. The message says why."""


class FetchedBytes:
    """The bytes of one version. The worker that fetches them makes this object and frees them."""

    def __init__(self, rank: str, request: Fetch) -> None:
        self.nonce = request.nonce
        self._rank = rank
        self._request = request
        self._deadline_s = time.monotonic() + request.timeout_s
        self._received_bytes = 0  # chunks arrive in order
        self._lock = threading.Lock()  # for the attributes below, which both `run` and `close` change
        self._closed = False
        self._call: grpc.Call | None = None
        self._arena: Arena | None = None  # set once it is filled
        self._progress = Progress(rank, request.nonce, done=False)

    @property
    def progress(self) -> Progress:
        """The progress."""
        return self._progress

    def run(self) -> None:
        """Fetches everything. Call it in a thread. `progress` reports errors."""
        arena, failure = None, ""
        try:
            arena = Arena.allocate(self._request.size_bytes)
            self._fetch(arena)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        with self._lock:
            kept = arena is not None and not failure and not self._closed
            path = arena.path if arena is not None and kept else ""
            self._arena = arena if kept else None
            self._progress = Progress(self._rank, self.nonce, True, failure, path)
        if arena is not None and not kept:
            arena.close()

    def close(self) -> None:
        """Stops fetching, and frees the memory as soon as no worker maps it. Safe to call more than once."""
        with self._lock:
            self._closed = True
            call, arena, self._arena = self._call, self._arena, None
        if call is not None:
            call.cancel()
        if arena is not None:
            arena.close()

    def _fetch(self, arena: Arena) -> None:
        backoff = Backoff(_FIRST_DELAY_S, _MAX_DELAY_S)
        caller = Caller(CallerFiles(**self._request.caller))
        with caller.channel(self._request.address, _CHANNEL_OPTIONS) as channel:
            pull: Pull = channel.unary_stream(_PULL, weights_pb2.PullWeightsRequest.SerializeToString)
            while self._received_bytes < arena.size_bytes:
                before = self._received_bytes
                broken = self._receive(pull, arena, caller.metadata)
                if self._received_bytes == arena.size_bytes:
                    return
                if self._received_bytes > before:
                    backoff.reset()
                delay_s = backoff.next_s()
                if time.monotonic() + delay_s > self._deadline_s:
                    raise FetchError(f"the stream from {self._request.address} broke, and no time is left: {broken}")
                time.sleep(delay_s)

    def _receive(self, pull: Pull, arena: Arena, metadata: tuple[tuple[str, str], ...]) -> str:
        """Receives missing bytes until the stream ends or breaks, and returns why it did. Raises FetchError for a
        damaged chunk, and for any status but UNAVAILABLE."""
        request = weights_pb2.PullWeightsRequest(push_id=self._request.push_id, chunk_bytes=_CHUNK_BYTES)
        request.ranges.add(start=self._received_bytes, end=arena.size_bytes)
        with self._lock:
            if self._closed:
                raise FetchError("given up")
            call = self._call = pull(request, timeout=max(0.0, self._deadline_s - time.monotonic()), metadata=metadata)
        try:
            for frame in call:
                chunk = parse_chunk(frame)
                if chunk is not None:  # neither the header nor the end frame
                    self._take(chunk, arena)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise FetchError(f"{self._request.address} answered {error.code().name}: {error.details()}") from None
            return str(error.details())
        finally:
            call.cancel()
        return "it ended early"

    def _take(self, chunk: Chunk, arena: Arena) -> None:
        if chunk.offset != self._received_bytes or chunk.offset + len(chunk.data) > arena.size_bytes:
            raise FetchError(f"bytes at {chunk.offset} arrived, expected those at {self._received_bytes}")
        if chunk.crc32c is not None and crc32c_of(chunk.data) != chunk.crc32c:
            raise FetchError(f"the chunk of {len(chunk.data)} bytes at {chunk.offset} was damaged")
        arena.write(chunk.offset, chunk.data)
        self._received_bytes += len(chunk.data)
