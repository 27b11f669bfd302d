"""What is left of a client in a process that was forked from the one that used it: errors that say so, and nothing to
wait for. `test_states` tries every call, in a program of its own."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from genserve.client import Client
from genserve.errors import UnavailableError
from genserve.transport.connection import Connection
from genserve.transport.errors import ClientClosedError, ClientMisuseError
from tests.support.scripted_services import ScriptedDaemon


def in_child(check: Callable[[], None]) -> None:
    """Runs a check in a forked process, in which it has to pass."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(30)
            check()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


async def test_a_connection_of_before_and_a_new_one_say_so_in_a_child(daemon: ScriptedDaemon) -> None:
    """One of before can be closed there, which closes nothing of its parent's."""
    connection, unused, closed = Connection(daemon.target), Connection(daemon.target), list[str]()
    connection.on_close(lambda: closed.append("closed"))
    await connection.channel.channel_ready()

    async def check() -> None:
        for each in (connection, unused, Connection(daemon.target)):
            with pytest.raises(ClientMisuseError, match="fork"):
                assert each.channel is None
            with pytest.raises(ClientMisuseError, match="fork"):
                each.another_channel()
        await connection.close()
        with pytest.raises(ClientClosedError):
            assert connection.channel is None
        assert closed == []

    in_child(lambda: asyncio.run(check()))
    assert connection.channel.get_state() is not None
    await connection.close()
    assert closed == ["closed"]


def test_the_thread_of_a_blocking_client_is_not_waited_for_in_a_child() -> None:
    """It runs in the parent alone."""
    with Client("127.0.0.1:1") as client:

        def check() -> None:
            with pytest.raises(ClientMisuseError, match="fork"):
                client.status()
            client.close()
            with pytest.raises(ClientClosedError):
                client.status()

        in_child(check)
        with pytest.raises(UnavailableError):  # the thread runs on
            client.status()
