"""What a process that is forked from one that has used gRPC may still do with a client: be told, and end."""

import ctypes
import os
import weakref
from typing import Final

import grpc.aio

from genserve.client.transport.errors import ClientMisuseError

_channels: Final[weakref.WeakSet[grpc.aio.Channel]] = weakref.WeakSet()


def forked_error() -> ClientMisuseError:
    """What a client says in a process that was forked from one that had used gRPC."""
    return ClientMisuseError(
        "this process was forked from one that had used a client, and gRPC does not work across a fork: "
        "start the process with multiprocessing's method spawn, or make the first client after the fork"
    )


def never_free_in_children(channel: grpc.aio.Channel) -> None:
    """gRPC closes a channel that is freed, with threads that a forked process does not have: a quarter of the children
    crashed as they ended. There the channel gets a reference that nobody gives back, so that it outlives the
    interpreter too."""
    _channels.add(channel)


def _keep_channels() -> None:
    for channel in list(_channels):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))


os.register_at_fork(after_in_child=_keep_channels)
