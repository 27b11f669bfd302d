"""Memory of a trainer that a push names."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from genserve.errors import PushNotFoundError
from genserve.v1 import weights_pb2
from tests.rpc.frames import DATA, Frame
from tests.support.scripted_daemon import Daemon

WEIGHTS = {
    "a": numpy.frombuffer(DATA[:16], "float32").copy(),
    "b": torch.frombuffer(bytearray(DATA[16:]), dtype=torch.bfloat16),
}


@contextmanager
def memory(data: bytes = DATA, name: str = "genserve-push-test") -> Iterator[tuple[str, int]]:
    """A memfd with these bytes: its path and descriptor."""
    fd = os.memfd_create(name)
    try:
        os.write(fd, data)
        yield f"/proc/{os.getpid()}/fd/{fd}", fd
    finally:
        os.close(fd)


def segment(path: str, start: int = 0, end: int = 32, **fields: Any) -> Frame:
    """Bytes [start, end) of the byte space, which lie at the same place of the memory."""
    place = {"segment_offset": start, "offset": start, "length": end - start, **fields}
    return Frame(segment=weights_pb2.PushSegment(path=path, **place))


def has_bytes(daemon: Daemon, num_bytes: int, push_id: str = "p1") -> bool:
    """Whether the push is there and has so many."""
    try:
        return daemon.registry.report(push_id).push.received_bytes >= num_bytes
    except PushNotFoundError:
        return False


@contextmanager
def pipe() -> Iterator[tuple[str, int]]:
    """The path of its writing end, and the descriptor of the other."""
    reading, writing = os.pipe()
    try:
        yield f"/proc/{os.getpid()}/fd/{writing}", reading
    finally:
        os.close(reading)
        os.close(writing)
