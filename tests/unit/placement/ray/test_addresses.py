"""The lines that tell the router who serves."""

import io
import os

from genserve.errors import ReplicaNotFoundError
from genserve.placement.ray.addresses import ServingAddresses, parsed
from tests.support.refusals import refuses


async def test_every_change_is_a_line_with_all_addresses() -> None:
    """The reader needs none of the lines before."""
    lines = io.BytesIO()
    serving = ServingAddresses(lines)
    serving.put([])
    serving.add("b:1")
    serving.add("a:1")
    await serving.remove("b:1")
    told = [parsed(line) for line in lines.getvalue().splitlines()]
    assert told == [frozenset(), {"b:1"}, {"a:1", "b:1"}, {"a:1"}]
    with refuses(ReplicaNotFoundError, says="b:1"):
        await serving.remove("b:1")


def test_a_line_is_written_at_once() -> None:
    """However much its file gathers."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as lines, os.fdopen(reading, "rb", buffering=0) as read:
        ServingAddresses(lines).add("a:1")
        os.set_blocking(reading, False)
        assert parsed(read.read(100)) == {"a:1"}


def test_a_reader_that_is_gone_is_no_failure() -> None:
    """The process is told to end, and drains what it runs."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb", buffering=0) as lines:
        ServingAddresses(lines).add("a:1")
