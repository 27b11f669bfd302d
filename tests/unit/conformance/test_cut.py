"""A link is cut when the daemon has what came before, however late it reads."""

import asyncio
from contextlib import suppress

from clients.conformance.runner.cut import CutLink
from tests.support.fault_proxy import Way
from tests.support.patience import until

_CUT, _WHOLE = 100_000, 300_000


async def test_a_daemon_that_reads_late_has_bytes_when_its_link_is_cut() -> None:
    read, asked = 0, 0
    may_read = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal read
        await may_read.wait()
        with suppress(ConnectionError):
            while data := await reader.read(1 << 14):
                read += len(data)
        writer.close()

    async def received() -> int:
        nonlocal asked
        asked += 1
        if asked == 3:
            may_read.set()
        return read

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with CutLink(target, Way.TO_SERVER, _CUT, _WHOLE, received=received) as link:
            host, _, port = link.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(bytes(_WHOLE))
            is_cut = asyncio.create_task(_ended(reader))
            await until(is_cut.done)
            writer.close()
            assert _CUT <= read < _WHOLE
            again_reader, again = await asyncio.open_connection(host, int(port))
            again.write(bytes(_WHOLE - read))
            again.write_eof()
            await _ended(again_reader)
            again.close()
            assert read == _WHOLE
            assert link.differences() == []


async def _ended(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        await reader.read()
