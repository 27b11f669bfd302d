"""Pushes for which there is no room: refused at the header, before a byte, and never by a signal."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from genserve.errors import StagingFullError
from tests.faults.limits import limited
from tests.support.subject import Subject


async def test_a_push_over_the_quota_is_refused_until_there_is_room(subject: Subject) -> None:
    """--max-staging-bytes holds what is served and two and a half pushes. Two are staged, the third is refused
    at its header."""
    version = await subject.oracle.served_version()
    for number in (1, 2):
        staged = await subject.push("b", push_id=f"staged {number}", action="stage", staging_ttl_s=4.0)
        assert staged.push.state == "staged"
    raw = await subject.raw_push()
    with pytest.raises(StagingFullError):
        await raw.send(raw.frames())
    for number in (1, 2):
        assert (await subject.client.get_push(f"staged {number}")).push.state == "staged"
    await subject.oracle.holds((version, "a"))  # waits for the end of their time to live


def first_free(pid: int) -> int:
    """The lowest number that no descriptor has: as a limit it refuses every further one."""
    taken = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    return next(number for number in range(len(taken) + 1) if number not in taken)


@asynccontextmanager
async def spare_taken(subject: Subject) -> AsyncIterator[None]:
    """The arena that awaits the next push is that of one that is staged."""
    await subject.push("b", action="stage", push_id="takes the spare one")
    try:
        yield
    finally:
        await subject.client.discard_push("takes the spare one")


async def test_memory_that_the_kernel_refuses_is_told_and_kills_nobody(
    subject: Subject, checkpoints: dict[str, Path]
) -> None:
    """The arena cannot have its size: RESOURCE_EXHAUSTED, not a SIGBUS at the first chunk."""
    raw = await subject.raw_push()
    async with subject.refuses(StagingFullError), spare_taken(subject):
        with limited(subject.pid, psutil.RLIMIT_FSIZE, len(raw.data) // 2):
            await raw.send(raw.frames((0, len(raw.data))))


async def test_a_descriptor_that_the_kernel_refuses_is_told_and_kills_nobody(subject: Subject) -> None:
    """The arena cannot have a descriptor. The connection is there already, as its own would be refused."""
    version = await subject.oracle.served_version()
    subject.oracle.committed[version + 1] = "b"
    async with subject.refuses(StagingFullError), spare_taken(subject):
        with limited(subject.pid, psutil.RLIMIT_NOFILE, first_free(subject.pid)):
            await subject.push("b", version=version + 1)
