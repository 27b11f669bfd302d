"""Memory that a stream hands over, on its way into a push."""

import os

import pytest

from genserve.memory.daemon_processes import DaemonProcesses
from genserve.memory.segment import SegmentChunk
from genserve.weights.push.segments import SegmentReader
from tests.support.idle_process import idle_process
from tests.unit.weights.conftest import Rig, header, tensors, weights


async def test_a_piece_that_no_thread_can_copy_holds_no_place(rig: Rig) -> None:
    """Here the reader has let go of its thread; a machine may have none left. Others can send those bytes."""
    fd = os.memfd_create("genserve-push-unit")
    os.write(fd, weights(1))
    stream = await rig.registry.open(header())
    reader = SegmentReader(DaemonProcesses(idle_process().pid))
    await reader.close()
    with pytest.raises(RuntimeError):
        await reader.take(stream, SegmentChunk(f"/proc/{os.getpid()}/fd/{fd}", 0, 0, 32, None))
    assert not stream.is_claimed(0, 32)
    stream.write(0, weights(1), None)
    await stream.finish()
    stream.detach()
    assert rig.engine.live == tensors(1)
    await reader.close()
    os.close(fd)
