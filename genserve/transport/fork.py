"""What happens to a client in a process that was forked from one that used gRPC: an error, and a clean end."""

import ctypes
import os
import weakref
from typing import Final

import grpc.aio

from genserve.transport.errors import ClientMisuseError

_channels: Final[weakref.WeakSet[grpc.aio.Channel]] = weakref.WeakSet()


def forked_error() -> ClientMisuseError:
    """The error of a client in a process that was forked from one that used gRPC."""
    return ClientMisuseError(
        "this process was forked from one that had used a client, and gRPC does not work across a fork: "
        "start the process with multiprocessing's method spawn, or make the first client after the fork"
    )


def never_free_in_children(channel: grpc.aio.Channel) -> None:
    """Keeps a channel alive in child processes. gRPC closes a freed channel with threads that a forked process does not
    have: a quarter of the children crashed when they ended. In a child the channel gets a reference that is never
    released, so that it outlives the interpreter."""
    _channels.add(channel)


def _keep_channels() -> None:
    for channel in list(_channels):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_keep_channels)
