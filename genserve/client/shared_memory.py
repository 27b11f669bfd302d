"""Weights handed to a daemon on the same host as shared memory: its kernel copies them, no byte goes over a socket."""

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from genserve.v1 import weights_pb2

# Below this a push is over before it has been asked whether memory can be handed over.
MIN_BYTES: Final = 8 << 20
CHUNK_BYTES: Final = 4 << 20
_NAME: Final = "genserve-push"  # the daemon opens no memory of another name


class SharedSegment:
    """Memory without a name, as large as the byte space of a push; only what is written takes room."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)  # also when a client is dropped and never closed
        os.fchmod(self._fd, 0o600)
        os.ftruncate(self._fd, size_bytes)
        self._path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, offset: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Copies `pieces` to `offset`; releases the GIL."""
        for piece in pieces:
            # Not through a map: the pages would be cleared before they are written.
            rest = memoryview(piece)
            while rest:
                num_written = os.pwrite(self._fd, rest, offset)
                offset, rest = offset + num_written, rest[num_written:]

    def frame(self, offset: int, length: int) -> bytes:
        """The frame that hands bytes over that have been written."""
        segment = weights_pb2.PushSegment(path=self._path, segment_offset=offset, offset=offset, length=length)
        return weights_pb2.PushWeightsRequest(segment=segment).SerializeToString()

    def close(self) -> None:
        """Gives the memory back."""
        self._fd = -1
        self._close()


class SpareSegment:
    """The memory of the last push, kept for the next one: to have its pages cleared again would take longer than to
    write them."""

    def __init__(self) -> None:
        self._spare: SharedSegment | None = None

    def take(self, size_bytes: int) -> SharedSegment:
        """Memory of this size, for the caller alone."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.size_bytes == size_bytes:
            return spare
        if spare is not None:
            spare.close()
        return SharedSegment(size_bytes)

    def give_back(self, segment: SharedSegment) -> None:
        """Only what no daemon reads any more: the push that it was taken for has been answered with success."""
        self.close()
        self._spare = segment

    def close(self) -> None:
        """Gives the memory back."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None


def can_share(target: str, host_id: str) -> bool:
    """Whether the daemon at `target`, which told its `host_id`, can open this process's memory. It is so exact as it is
    cheap: a daemon behind a proxy on this host still says no, and then bytes are sent."""
    return host_id != "" and is_local(target) and host_id == own_host_id()


def is_local(target: str) -> bool:
    """Whether a target of gRPC is an address of this host alone."""
    host = target.removeprefix("dns:").removeprefix("///").rpartition(":")[0].strip("[]")
    return target.startswith(("unix:", "unix-abstract:")) or host in ("localhost", "::1") or host.startswith("127.")


def own_host_id() -> str:
    """As `GetServerInfoResponse.host_id` says; "" where the kernel is not Linux."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id}:{os.stat('/proc/self/ns/pid').st_ino}:{os.geteuid()}"
    except OSError:
        return ""
