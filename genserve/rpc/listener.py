"""A gRPC server as all processes of genserve make one, and the addresses that it listens on."""

from collections.abc import Sequence

import grpc.aio

from genserve.addresses import joined
from genserve.listening import require_unused
from genserve.rpc.interceptor import StatusInterceptor
from genserve.rpc.observed import CallObserver, ObservedCalls

SERVER_OPTIONS = (
    # A port in use is an error, not a second server at the same address.
    ("grpc.so_reuseport", 0),
    # A chunk of a push in one frame of HTTP/2 instead of 64: receiving is up to a third faster. It is about what is
    # received here; what readers of token streams leave unread is up to them.
    ("grpc.http2.max_frame_size", 4 << 20),
    # What one call may bring beside its messages; gRPC's own default, kept where a newer one would raise it.
    ("grpc.absolute_max_metadata_size", 16 << 10),
    # Peers that disappeared without a word are noticed, so that their requests do not continue.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients may ping as they like: by default gRPC closes connections with pings faster than every five minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def make_server(max_message_bytes: int, observers: Sequence[CallObserver] = ()) -> grpc.aio.Server:
    """A server that is bound to no address yet. `observers` are told of its calls."""
    observed = (ObservedCalls(observers),) if observers else ()
    return grpc.aio.server(
        interceptors=[*observed, StatusInterceptor()],
        options=[*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)],
    )


def bind(server: grpc.aio.Server, host: str, port: int, uds: str) -> str:
    """Binds to a TCP port (0 = a free one, -1 = none) and, if `uds` names one, to a Unix socket. Returns the address
    for clients: the TCP one if there is one. Raises OSError naming an address that cannot be used."""
    address = ""
    if uds:
        require_unused(uds)
        address = f"unix:{uds}"
        add_port(server, address)
    if port != -1:
        address = joined(host, add_port(server, joined(host, port)))
    return address


def add_port(server: grpc.aio.Server, address: str) -> int:
    """Binds to an address, and returns its port; 1 for a Unix socket. Raises OSError naming the address."""
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: is another process listening there?") from error
    if port == 0:
        raise OSError(f"cannot listen on {address}")
    return port
