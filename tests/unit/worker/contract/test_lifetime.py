"""When a worker on another host takes the daemon for ended."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from genserve.worker.contract import lifetime


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Milliseconds for seconds, and the end of a thread for that of the process, which has failed."""
    exits: list[int] = []
    monkeypatch.setattr(lifetime, "os", SimpleNamespace(_exit=exits.append))
    monkeypatch.setattr(lifetime, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(lifetime, "UNREACHABLE_S", 0.3)
    yield
    assert len(exits) == 1 and exits[0] != 0


@contextmanager
def bound() -> Iterator[tuple[socket.socket, int]]:
    """A socket that does not listen yet, on a port that nobody else gets meanwhile."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(30)
        yield listener, int(listener.getsockname()[1])


def wait_seen(listener: socket.socket) -> None:
    """Until it was looked at once more, and once again, so that the first look has counted."""
    for _ in range(2):
        listener.accept()[0].close()


def watched(address: str, start_timeout_s: float = 600.0) -> threading.Thread:
    """A thread that ends when the daemon has."""
    before = {*threading.enumerate()}
    lifetime.end_with_address.cache_clear()  # another test may have had the port
    lifetime.end_with_address(address, start_timeout_s)
    (thread,) = (each for each in {*threading.enumerate()} - before if each.name == "genserve-watch")
    return thread


def test_a_port_that_nobody_listens_on_any_more() -> None:
    """Not before somebody has: the daemon begins to listen after its workers."""
    with bound() as (listener, port):
        watch = watched(f"127.0.0.1:{port}")
        watch.join(0.2)
        assert watch.is_alive()
        listener.listen()
        wait_seen(listener)
        assert watch.is_alive()
    watch.join(30.0)
    assert not watch.is_alive()


def test_a_daemon_that_never_begins_to_listen() -> None:
    """Within the time that it has for that."""
    with bound() as (_, port):
        began_s = time.monotonic()
        watch = watched(f"127.0.0.1:{port}", 0.2)
        watch.join(30.0)
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
    connect, gone, tried = socket.socket.connect, threading.Event(), list[bool]()

    def routed(self: socket.socket, where: object) -> None:
        tried.append(not gone.is_set())
        if not tried[-1]:
            raise OSError(113, "No route to host")
        connect(self, where)  # type: ignore[arg-type]

    def wait_tried(*, is_reached: bool) -> None:
        """Until a look that has begun after this has counted: another one has begun after it."""
        before, deadline_s = len(tried), time.monotonic() + 30
        while tried[before:].count(is_reached) < 3:
            assert watch.is_alive() and time.monotonic() < deadline_s
            time.sleep(0.005)

    now_s = 0.0
    monkeypatch.setattr(socket.socket, "connect", routed)
    monkeypatch.setattr(lifetime, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep))
    monkeypatch.setattr(lifetime, "UNREACHABLE_S", 60.0)
    with bound() as (listener, port):
        listener.listen(1000)
        watch = watched(f"localhost:{port}")
        wait_tried(is_reached=True)
        gone.set()
        now_s += 59.0
        wait_tried(is_reached=False)
        gone.clear()
        wait_tried(is_reached=True)
        gone.set()
        wait_tried(is_reached=False)
        now_s += 59.0
        wait_tried(is_reached=False)
        assert watch.is_alive() and asked == ["localhost"]
        now_s += 2.0
        watch.join(30.0)
        assert not watch.is_alive()
