"""Addresses of the network, and whether this machine can listen on them."""

import socket
from pathlib import Path

import pytest

from genserve.net import bound_socket, check_replica, is_local, is_loopback, joined, require_free

ADDRESSES = {
    "127.0.0.1:50051": True,
    "127.1.2.3:50051": True,
    "localhost:1": True,
    "[::1]:1": True,
    "dns:///localhost:1": True,
    "dns:localhost:1": True,
    "unix:/run/genserve": True,
    "unix-abstract:genserve": True,
    "10.0.0.1:1": False,
    "trainer-127.example:1": False,
    "127.example:1": False,
    "dns:///replica:1": False,
    "dns://127.0.0.1/replica:1": False,
    "ipv4:127.0.0.1:5,10.0.0.1:5": False,
    # The other end of a connection.
    "ipv4:127.0.0.1:5": True,
    "ipv6:%5B::1%5D:5": True,
    "unix:": True,
    "ipv4:10.0.0.1:5": False,
    "ipv4:192.127.0.1:5": False,
    "ipv6:%5Bfe80::1%5D:5": False,
    "ipv6:%5B::10%5D:5": False,
    "": False,
}


@pytest.mark.parametrize(("address", "local"), ADDRESSES.items())
def test_addresses_of_this_host_are_local(address: str, local: bool) -> None:
    """By the address alone; whether the daemon there is on this host is told by its host id."""
    assert is_local(address) is local


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("[::1]", True)]
    + [(host, False) for host in ("0.0.0.0", "::", "", "example.org", "127.0.0.1.example.org")],
)
def test_loopback_addresses_are_known(host: str, loopback: bool) -> None:
    """A name that begins as an address is a name."""
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6_gets_brackets_once(host: str) -> None:
    """Its colons are not the port's; names and other addresses have none."""
    assert joined(host, 5) == "[::1]:5"
    assert joined("localhost", 0) == "localhost:0"


REPLICAS = {
    "127.0.0.1:50051": True,
    "replica-0.replicas.default.svc:50051": True,
    "[::1]:50051": True,
    "dns:///replica:1": True,
    "ipv6:[::1]:1": True,
    "unix:/run/genserve": True,
    "unix-abstract:genserve": True,
    "": False,
    "replica": False,
    ":50051": False,
    "replica:": False,
    "replica:0": False,
    "replica:65536": False,
    "replica:\u0661": False,
    "replica: 1": False,
    "a b:1": False,
    "::1:50051": False,
    "http://replica:1": False,
    "replica-0:1,replica-1:1": False,
    "unix:": False,
}


@pytest.mark.parametrize(("address", "valid"), REPLICAS.items())
def test_what_names_a_replica(address: str, valid: bool) -> None:
    """One host and its port, or a socket: what cannot be one is refused when it is added, and not called for ever."""
    try:
        check_replica(address)
    except ValueError as error:
        assert not valid
        assert str(error).startswith("must be HOST:PORT or unix:PATH, ")
    else:
        assert valid


def test_an_address_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A port in use, an unknown host, and paths that no Unix socket can take, with the reason."""
    path, file, long_path = tmp_path / "s", tmp_path / "file", "/tmp/" + "s" * 103
    file.touch()
    with socket.socket() as taken, socket.socket(socket.AF_UNIX) as taken_path:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        taken_path.bind(str(path))
        taken_path.listen()
        port = taken.getsockname()[1]
        for host, number, uds, named in (
            ("127.0.0.1", port, "", f"127.0.0.1:{port}"),
            ("no.such.host.invalid", 0, "", "no.such.host.invalid:0"),
            ("", -1, str(path), f"unix:{path}: another process listens there"),
            ("", -1, str(file), f"unix:{file}: something that is no socket is there"),
            ("", -1, str(tmp_path), f"unix:{tmp_path}: something that is no socket is there"),
            ("", -1, long_path, f"unix:{long_path}: the path of a socket has 107 bytes at most, and this one 108"),
            ("", -1, "/none/s", "unix:/none/s: /none is not a directory"),
        ):
            with pytest.raises(OSError, match=f"cannot listen on {named}"):
                require_free(host, number, uds)
    path.unlink()
    require_free("localhost", 0, str(path))
    require_free("", -1, long_path[:-1])
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
