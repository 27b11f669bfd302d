"""Which bytes of a push or a pull are missing, and when one that broke goes on. Without gRPC."""

import hashlib
import time
from collections.abc import Iterator
from typing import Any

from clients.conformance.drivers.crc32c import crc32c
from genserve.v1 import weights_pb2

Ranges = list[tuple[int, int]]
LOOK_UP_TIMEOUT_S = 30.0
MIN_RESUMES, RESUME_TIMEOUT_S = 5, 30.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 3.2


def num_bytes(ranges: Ranges) -> int:
    return sum(end - start for start, end in ranges)


def split(ranges: Ranges, num_parts: int) -> list[Ranges]:
    """About as many bytes for each stream."""
    parts: list[Ranges] = [[] for _ in range(num_parts)]
    for start, end in ranges:
        bounds = [start + (end - start) * i // num_parts for i in range(num_parts + 1)]
        for part, bound, following in zip(parts, bounds, bounds[1:], strict=False):
            part.append((bound, following))
    return parts


def pauses() -> Iterator[float]:
    """Between attempts, in seconds."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Resumes:
    """Waits before each resume of a transfer of which `missing_bytes` are missing."""

    def __init__(self, missing_bytes: int) -> None:
        self._least_bytes = missing_bytes
        self._num_in_vain = 0

    def wait(self, missing_bytes: int) -> bool:
        """Returns False if the transfer is given up. That less is missing than ever before is progress."""
        if self._num_in_vain == 0 or missing_bytes < self._least_bytes:
            self._least_bytes = min(missing_bytes, self._least_bytes)
            self._num_in_vain, self._ends_s, self._pauses_s = 0, time.monotonic() + RESUME_TIMEOUT_S, pauses()
        if self._num_in_vain >= MIN_RESUMES and time.monotonic() > self._ends_s:
            return False
        self._num_in_vain += 1
        time.sleep(next(self._pauses_s))
        return True


class Pulled:
    """The bytes of a pull, which come in order. `version`: the one to pull, if it is given."""

    def __init__(self, version: int | None) -> None:
        self._version = version
        self._header: Any = None
        self._space = bytearray()

    @property
    def missing_bytes(self) -> int | None:
        """None before the pull has begun."""
        return None if self._header is None else self._header.manifest.total_bytes - len(self._space)

    def request(self) -> Any:
        """For what is missing, of the version that has begun."""
        request = weights_pb2.PullWeightsRequest(weight_version=self._version)
        if self._space:
            request.ranges.add(start=len(self._space), end=self._header.manifest.total_bytes)
        return request

    def add(self, message: Any) -> str | None:
        """Takes a header or a chunk. Returns the reason if it is wrong."""
        if message.HasField("header"):
            if self._header is not None and message.header.attempt != self._header.attempt:
                return "WEIGHT_VERSION_MISMATCH"  # another one has its number now
            self._header, self._version = message.header, message.header.weight_version
            return None
        chunk = message.chunk
        if chunk.HasField("crc32c") and crc32c(chunk.data) != chunk.crc32c:
            return "CHECKSUM_MISMATCH"
        self._space += chunk.data
        return None

    def sha256(self) -> dict[str, str]:
        """Of each tensor."""
        tensors = self._header.manifest.tensors
        return {t.name: hashlib.sha256(self._space[t.offset : t.offset + t.length]).hexdigest() for t in tensors}

    @property
    def version(self) -> int:
        return int(self._header.weight_version)
