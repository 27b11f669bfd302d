"""Whether this machine can listen on an address: asked before the engine starts, which takes long."""

import errno
import socket
from pathlib import Path

from genserve.net.addresses import joined


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
        if not Path(uds).parent.is_dir():
            raise OSError(f"cannot listen on unix:{uds}: {Path(uds).parent} is not a directory")
        require_unused(uds)
    if port != -1:
        bound_socket(host, port, flag).close()


def require_unused(path: str) -> None:
    """Raises OSError for a Unix socket that another process listens on. gRPC would remove it."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise OSError(f"cannot listen on unix:{path}: another process listens there")
