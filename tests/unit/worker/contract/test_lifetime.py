"""When a worker on another host takes the daemon for ended."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from genserve.worker.contract import lifetime


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds for seconds."""
    monkeypatch.setattr(lifetime, "_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(lifetime, "_UNREACHABLE_S", 0.3)


@contextmanager
def listening(port: int = 0) -> Iterator[int]:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(100)
        yield int(listener.getsockname()[1])


def watched(address: str, start_timeout_s: float = 30.0) -> threading.Thread:
    """A thread that ends when the daemon has."""
    thread = threading.Thread(target=lifetime._wait_for_end, args=(address, start_timeout_s), daemon=True)
    thread.start()
    return thread


def test_a_port_that_nobody_listens_on_any_more() -> None:
    """Not before somebody has: the daemon begins to listen after its workers."""
    with listening() as port:
        pass
    watch = watched(f"127.0.0.1:{port}")
    watch.join(0.2)
    assert watch.is_alive()
    with listening(port):
        watch.join(0.2)
        assert watch.is_alive()
    watch.join(5.0)
    assert not watch.is_alive()


def test_a_daemon_that_never_begins_to_listen() -> None:
    """Within the time that it has for that."""
    with listening() as port:
        pass
    began_s = time.monotonic()
    watch = watched(f"127.0.0.1:{port}", 0.2)
    watch.join(5.0)
    assert not watch.is_alive()
    assert time.monotonic() - began_s >= 0.2


def test_trouble_on_the_way_is_not_the_daemons_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a name service that fails, nor a route that is gone for less than a minute; longer ends it."""
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def once(host: str, *args: object, **options: object) -> object:
        asked.append(host)
        if len(asked) > 1:
            raise socket.gaierror("no name service")
        return resolve(host, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", once)
    connect, gone = socket.socket.connect, threading.Event()

    def routed(self: socket.socket, where: object) -> None:
        if gone.is_set():
            raise OSError(113, "No route to host")
        connect(self, where)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", routed)
    with listening() as port:
        watch = watched(f"localhost:{port}")
        watch.join(0.2)
        gone.set()
        watch.join(0.15)
        assert watch.is_alive()
        gone.clear()
        watch.join(0.5)
        assert watch.is_alive() and asked == ["localhost"]
        gone.set()
        watch.join(5.0)
        assert not watch.is_alive()
