"""The pipe between a writer and a reader: its order, its bound and its end."""

import asyncio

import pytest

from genserve.client.direct.calls import READ_AHEAD, Pipe, PipeEndedError


async def test_messages_come_in_order_and_then_the_end() -> None:
    """Every read after the last message returns None."""
    pipe: Pipe[int] = Pipe()
    for number in range(3):
        await pipe.write(number)
    pipe.end()
    assert [await pipe.read() for _ in range(5)] == [0, 1, 2, None, None]


async def test_the_error_of_the_end_comes_after_the_messages() -> None:
    """A second call of `end` changes nothing."""
    pipe: Pipe[int] = Pipe()
    await pipe.write(1)
    pipe.end(ValueError("x"))
    pipe.end()
    assert await pipe.read() == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="x"):
            await pipe.read()


async def test_a_writer_waits_for_the_reader_and_a_reader_for_the_writer() -> None:
    """The pipe holds READ_AHEAD messages at most."""
    pipe: Pipe[int] = Pipe()
    reading = asyncio.create_task(pipe.read())
    await asyncio.sleep(0)
    assert not reading.done()
    await pipe.write(-1)
    assert await reading == -1
    for number in range(READ_AHEAD):
        await pipe.write(number)
    writing = asyncio.create_task(pipe.write(READ_AHEAD))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not writing.done()
    assert await pipe.read() == 0
    await writing


@pytest.mark.parametrize("count", [0, READ_AHEAD])
async def test_writing_after_the_end_raises(count: int) -> None:
    """Also in a writer that waited for room."""
    pipe: Pipe[int] = Pipe()
    for number in range(count):
        await pipe.write(number)
    writing = asyncio.create_task(pipe.write(1))
    if count:
        await asyncio.sleep(0)
    pipe.end()
    with pytest.raises(PipeEndedError):
        await writing
    with pytest.raises(PipeEndedError):
        await pipe.write(2)


async def test_end_wakes_a_waiting_reader() -> None:
    """The reader gets the error."""
    pipe: Pipe[int] = Pipe()
    reading = asyncio.create_task(pipe.read())
    await asyncio.sleep(0)
    pipe.end(ValueError("x"))
    with pytest.raises(ValueError, match="x"):
        await reading
