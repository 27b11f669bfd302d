"""What is read of a push while it arrives: bytes of one origin, whatever was there before."""

import pytest

from genserve.errors import PushNotFoundError
from genserve.weights.push.pulled_push import PulledPush
from genserve.weights.push.types import PushAction, PushHeader
from tests.unit.weights.conftest import Rig, header, send, tensors, weights
from tests.unit.weights.prepared import PART

DATA = weights(1)


def fetched(attempt: str) -> PushHeader:
    """The header of a push that is fetched from a daemon, which names its origin."""
    return header(attempt=attempt, origin=f"origin {attempt}", action=PushAction.STAGE)


async def test_bytes_that_another_attempt_has_left_are_not_read(rig: Rig) -> None:
    """They may be of another origin. They are read when the attempt has brought them too."""
    await rig.stage_part(fetched("one"), 0, 16)
    stream = await rig.registry.open(fetched("two"))
    pulled = PulledPush(rig.registry.live.find("p1"), rig.resident)
    assert (pulled.origin, pulled.there(0, 32)) == ("origin two", None)
    send(stream, DATA, 8, 24)
    assert pulled.there(0, 32) == (8, 24)
    send(stream, DATA)
    await stream.finish()
    stream.detach()
    assert pulled.there(0, 32) == (0, 32)


async def test_reader_of_one_origin_reads_nothing_of_another(rig: Rig) -> None:
    """He is told, and asks again."""
    await rig.stage_part(fetched("one"), 0, 16)
    pulled = PulledPush(rig.registry.live.find("p1"), rig.resident)
    assert pulled.there(0, 32) == (0, 16)
    stream = await rig.registry.open(fetched("two"))
    with pytest.raises(PushNotFoundError):
        pulled.there(0, 32)
    with pytest.raises(PushNotFoundError):
        pulled.view(0, 16)
    stream.detach()


async def test_attempts_of_a_trainer_have_one_origin_as_long_as_the_push_is_here(rig: Rig) -> None:
    """The memory takes each byte once. A push that is sent under the id later has another one."""
    await rig.stage_part(header(attempt="one"), 0, 16)
    pulled = PulledPush(rig.registry.live.find("p1"), rig.resident)
    stream = await rig.registry.open(header(attempt="two"))
    send(stream, DATA)
    assert pulled.there(0, 32) == (0, 32)
    stream.detach()
    rig.registry.discard("p1")
    await rig.stage_part(header(attempt="one"), 0, 16)
    assert rig.registry.live.find("p1").header.origin != pulled.origin


async def test_what_this_daemon_has_completed_is_its_own(rig: Rig) -> None:
    """Another daemon completes the same part from another version."""
    part = header("part", 7, manifest=PART, origin="elsewhere")
    await rig.push(part, weights(7)[:16])
    assert rig.engine.live == {**tensors(0), "a": weights(7)[:16]}
    assert rig.resident.require().origin not in ("", "elsewhere")
    await rig.push(header("whole", 8, origin="elsewhere"))
    assert rig.resident.require().origin == "elsewhere"
