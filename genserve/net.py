"""Addresses as people and gRPC write them, and listening on them. No name is resolved except to listen."""

import errno
import ipaddress
import os
import re
import socket
from pathlib import Path
from typing import Final
from urllib.parse import unquote

DEFAULT_TARGET: Final = "127.0.0.1:50051"
"""Where clients look for the daemon unless they are given an address."""
DEFAULT_ROUTER: Final = "127.0.0.1:50050"
"""Where a router listens, and where `genserve replicas` looks for it."""

_SOCKET_SCHEMES: Final = ("unix:", "unix-abstract:")
_MAX_SOCKET_PATH_BYTES: Final = 107
"""Linux's."""
_HOST_SCHEMES: Final = ("dns:///", "dns:", "ipv4:", "ipv6:")


def is_loopback(host: str) -> bool:
    """Whether a name or an IP address, in brackets or not, is of this host alone."""
    host = host.removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name that has to be resolved, whatever it begins with


def is_socket(address: str) -> bool:
    """Whether an address is that of a Unix socket, and not of a host whose name begins so."""
    return address.startswith(_SOCKET_SCHEMES)


def is_local(address: str) -> bool:
    """Whether an address is of this host alone, as gRPC writes it: the target of a client ("localhost:50051",
    "dns:///localhost:50051", "unix:/run/genserve") or the other end of a connection ("ipv6:%5B::1%5D:50051")."""
    if is_socket(address):
        return True
    scheme = next((each for each in _HOST_SCHEMES if address.startswith(each)), "")
    return is_loopback(unquote(address.removeprefix(scheme)).rpartition(":")[0])


def joined(host: str, port: int) -> str:
    """The text "HOST:PORT", with an IPv6 address in brackets."""
    return f"[{host.strip('[]')}]:{port}" if ":" in host else f"{host}:{port}"


def split_name(name: str) -> tuple[str, int]:
    """The host and port of NAME:PORT. Raises ValueError."""
    host, _, port = name.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ValueError(f"must be NAME:PORT, is {name!r}")
    return host, int(port)


def port_of(address: str) -> str | None:
    """The port of HOST:PORT as it is written; None for what is written otherwise, such as a socket, a name without a
    port after "dns:", or several addresses."""
    if is_socket(address):
        return None
    scheme = next((each for each in _HOST_SCHEMES if address.startswith(each)), "")
    parts = re.fullmatch(r"(?:[^:/\[\]]+|\[[^\[\]]+\]):([^:/]*)", unquote(address.removeprefix(scheme)))
    return None if parts is None else parts[1]


def is_port(text: str) -> bool:
    """Whether a text is the number of a port that can be called."""
    return re.fullmatch("[0-9]{1,5}", text) is not None and 0 < int(text) <= 65535


def check_replica(address: str) -> None:
    """Raises ValueError unless an address is HOST:PORT or unix:PATH."""
    if is_socket(address):
        if not address.partition(":")[2]:
            raise ValueError("must be HOST:PORT or unix:PATH, has no path")
        return
    host, _, port = address.removeprefix(
        next((each for each in _HOST_SCHEMES if address.startswith(each)), "")
    ).rpartition(":")
    # One host: no list, no URL, and an IPv6 address in brackets, without which nobody knows where it ends.
    is_host = re.fullmatch(r"[^\s,/:\[\]]+|\[[0-9A-Fa-f:.%]+\]", host) is not None
    if not is_host or not is_port(port):
        raise ValueError(f"must be HOST:PORT or unix:PATH, is {address!r}")


def bound_socket(host: str, port: int, flag: str = "") -> socket.socket:
    """A socket that is bound to a TCP port (0 = a free one). Raises OSError naming the address, and the flag that says
    it, if there is one."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        flagged = f" ({flag})" if flag else ""
        remedy = f": {_in_use(flag or '--port')}" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"cannot listen on {joined(host, port)}{flagged}: {error.strerror}{remedy}") from error
    return bound


def _in_use(flag: str) -> str:
    return f"end what listens there, or choose another port with {flag} (0 = any free one)"


def require_free(host: str, port: int, uds: str = "", flag: str = "") -> None:
    """Raises OSError for an address that cannot be listened on. `port`: -1 = none, 0 = a free one."""
    if uds:
        require_unused(uds)
    if port != -1:
        bound_socket(host, port, flag).close()


def require_unused(path: str) -> None:
    """Raises OSError for a path that no Unix socket can take. One that another process listens on is among these,
    because gRPC would remove it; one that was left there is not."""
    if why := _taken(path):
        raise OSError(f"cannot listen on unix:{path}: {why}")


def _taken(path: str) -> str:
    """Why no Unix socket can take this path; "" = one can."""
    place, num_bytes = Path(path), len(os.fsencode(path))
    if num_bytes > _MAX_SOCKET_PATH_BYTES:
        return f"the path of a socket has {_MAX_SOCKET_PATH_BYTES} bytes at most, and this one {num_bytes}"
    if not place.parent.is_dir():
        return f"{place.parent} is not a directory"
    if not place.is_socket():
        return "something that is no socket is there: name a path that is free" if os.path.lexists(path) else ""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return ""
    return "another process listens there"
