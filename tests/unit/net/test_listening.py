"""What the daemon says of an address that it cannot listen on."""

import socket
from pathlib import Path

import pytest

from genserve.net.listening import bound_socket, require_free


def test_an_address_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A port in use, an unknown host, a Unix socket in use, and one in no directory."""
    path = tmp_path / "s"
    with socket.socket() as taken, socket.socket(socket.AF_UNIX) as taken_path:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        taken_path.bind(str(path))
        taken_path.listen()
        port = taken.getsockname()[1]
        for host, number, uds, named in (
            ("127.0.0.1", port, "", f"127.0.0.1:{port}"),
            ("no.such.host.invalid", 0, "", "no.such.host.invalid:0"),
            ("", -1, str(path), f"unix:{path}"),
            ("", -1, "/none/s", "unix:/none/s: /none is not a directory"),
        ):
            with pytest.raises(OSError, match=f"cannot listen on {named}"):
                require_free(host, number, uds)
    path.unlink()
    require_free("localhost", 0, str(path))
    require_free("", -1)


def test_the_flag_of_a_port_in_use_is_named() -> None:
    """An IPv6 address has brackets in the message, with and without them in the flag."""
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{port} \(--openai-port\): Address already"):
            bound_socket("127.0.0.1", port, "--openai-port")
    for host in ("2001:db8::1", "[2001:db8::1]"):
        with pytest.raises(OSError, match=r"cannot listen on \[2001:db8::1\]:0: "):
            bound_socket(host, 0)
