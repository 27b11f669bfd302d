"""A gRPC server as all processes of genserve make one, and the addresses that it listens on."""

import os
from collections.abc import Sequence
from typing import Final

import grpc.aio

from genserve.net import joined, require_unused
from genserve.rpc.access import AccessInterceptor, Callers
from genserve.rpc.observed import CallObserver, ObservedCalls
from genserve.rpc.services import ServiceTable
from genserve.security.certificates import server_credentials
from genserve.security.files import CertificateFiles
from genserve.security.roles import methods_of
from genserve.settings.listen_config import ListenConfig

_MAX_PENDING: Final = 1 << 15
"""Twice the default of --max-streams. It bounds what a flood of calls costs that are reset."""

SERVER_OPTIONS: Final = (
    # A port in use is an error, not a second server at the same address.
    ("grpc.so_reuseport", 0),
    # A chunk of a push in one frame of HTTP/2 instead of 64: receiving is up to a third faster. It is about what is
    # received here; what readers of token streams leave unread is up to them.
    ("grpc.http2.max_frame_size", 4 << 20),
    # Peers that disappeared without a word are noticed, so that their requests do not continue.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients may ping as they like: by default gRPC closes connections with pings faster than every five minutes.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Calls that have arrived, and that Python has not read yet. By default gRPC cancels them at random from 1,000 on,
    # without a reason: genserve decides which calls are admitted, and QUEUE_FULL says when to retry.
    ("grpc.server.max_pending_requests", _MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING),
    # Connections that say nothing hold a place among those that --max-connections allows; gRPC's own limit is 120 s.
    ("grpc.server_handshake_timeout_ms", 15_000),
)
_SOCKET_MODE: Final = 0o600


def server_options(config: ListenConfig) -> tuple[tuple[str, int], ...]:
    """The options of gRPC for a server that others can reach."""
    return (
        *SERVER_OPTIONS,
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.max_concurrent_streams", config.max_streams),
        # What one call may bring beside its messages. Both are given: gRPC refuses at random between them.
        ("grpc.max_metadata_size", config.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", config.max_metadata_bytes),
    )


def make_server(
    config: ListenConfig,
    table: ServiceTable,
    callers: Callers | None = None,
    observers: Sequence[CallObserver] = (),
) -> grpc.aio.Server:
    """A server with the methods of `table`, bound to no address yet. `callers`: who may call it; None = everybody,
    everything. `observers` are told of its calls, also of those that are refused."""
    interceptors: list[grpc.aio.ServerInterceptor] = []
    if callers is not None:
        opened = methods_of(config.open_service_names)
        interceptors.insert(0, AccessInterceptor(callers, opened, config.rates))
    if observers:
        interceptors.insert(0, ObservedCalls(observers))
    return _with(table, grpc.aio.server(interceptors=interceptors, options=server_options(config)))


def make_inner_server(
    max_message_bytes: int,
    table: ServiceTable,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    observers: Sequence[CallObserver] = (),
) -> grpc.aio.Server:
    """A server for processes of this daemon alone."""
    observed = (ObservedCalls(observers),) if observers else ()
    options = [*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes)]
    return _with(table, grpc.aio.server(interceptors=[*observed, *interceptors], options=options))


def _with(table: ServiceTable, server: grpc.aio.Server) -> grpc.aio.Server:
    server.add_generic_rpc_handlers((table,))
    return server


def bind(server: grpc.aio.Server, host: str, port: int, uds: str, certificate: CertificateFiles | None = None) -> str:
    """Binds to a TCP port (0 = a free one, -1 = none), with TLS if there is a certificate, and to the Unix socket
    `uds` ("" = none), which is not encrypted and which only this user can open. Returns the address for clients, the
    TCP one if there is one. Raises OSError naming an address that cannot be used, and CertificateError."""
    address = ""
    if uds:
        require_unused(uds)
        address = f"unix:{uds}"
        add_port(server, address)
        os.chmod(uds, _SOCKET_MODE)  # nobody can connect yet: the server listens when it starts
    if port != -1:
        address = joined(host, add_port(server, joined(host, port), certificate))
    return address


def add_port(server: grpc.aio.Server, address: str, certificate: CertificateFiles | None = None) -> int:
    """Binds to an address, and returns its port; 1 for a Unix socket. Raises OSError naming the address, and
    CertificateError."""
    try:
        if certificate is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(certificate))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: is another process listening there?") from error
    if port == 0:
        raise OSError(f"cannot listen on {address}")
    return port
