"""What a daemon does with requests of a client that was made for a later version of the contract.

Fields that it does not know are skipped, as protobuf does; a choice that it does not know is refused, because doing
something else instead would be worse.
"""

from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from genserve.v1 import control_pb2, generation_pb2, types_pb2, weights_pb2
from tests.rpc.frames import DATA, END, Frame, chunk, header, push, refused
from tests.support.scripted_daemon import Daemon

LATER: Any = 77
"""A value that no enum has."""
NEW_FIELD = b"\xa2\x3e\x03new"
"""Field 1000, of a text."""


def with_new_field(message: Message) -> bytes:
    """The message as a client writes it that knows one field more."""
    return message.SerializeToString() + NEW_FIELD


async def test_a_field_that_is_not_known_changes_nothing(daemon: Daemon) -> None:
    """In a request, and in a message of it."""
    ask = daemon.channel.unary_unary(
        "/genserve.v1.ControlService/Pause", response_deserializer=control_pb2.PauseResponse.FromString
    )
    answer = await ask(with_new_field(control_pb2.PauseRequest(holder="later")), timeout=30)
    assert answer.lease.holder == "later"
    await daemon.control.Resume(control_pb2.ResumeRequest(force=True))


async def test_a_push_whose_frames_have_fields_that_are_not_known_is_applied(daemon: Daemon) -> None:
    """Chunks are read without protobuf."""
    frames = []
    for frame in (await header(daemon), chunk(0, len(DATA)), END):
        kind = str(frame.WhichOneof("frame"))
        inner = type(getattr(frame, kind)).FromString(with_new_field(getattr(frame, kind)))
        frames.append(Frame(**{kind: inner}))
        assert NEW_FIELD in frames[-1].SerializeToString()
    assert (await push(daemon, frames)).push.state == weights_pb2.PUSH_STATE_APPLIED


@pytest.mark.parametrize(
    ("request_message", "method", "field"),
    [
        (control_pb2.PauseRequest(mode=LATER), "Pause", "mode"),
        (control_pb2.PauseRequest(kv_policy=LATER), "Pause", "kv_policy"),
        (control_pb2.SleepRequest(mode=LATER), "Sleep", "mode"),
    ],
)
async def test_a_choice_that_is_not_known_is_refused(
    daemon: Daemon, request_message: Message, method: str, field: str
) -> None:
    """The error names the field."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await getattr(daemon.control, method)(request_message, timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{field}: 77 is not a " in str(caught.value.details())


async def test_a_push_with_an_action_or_a_frame_that_is_not_known_is_refused(daemon: Daemon) -> None:
    """Nothing is applied."""
    wanted = await refused(daemon, [await header(daemon, action=LATER), chunk(0, len(DATA)), END])
    assert "77 is not a PushAction" in str(wanted.details())
    paused = weights_pb2.ApplyOptions(pause_mode=types_pb2.PAUSE_MODE_KEEP, prepare_mode=LATER)
    wanted = await refused(daemon, [await header(daemon, apply=paused), chunk(0, len(DATA)), END])
    assert wanted.code() is grpc.StatusCode.INVALID_ARGUMENT and "prepare_mode" in str(wanted.details())
    wanted = await refused(daemon, [await header(daemon, push_id="p2"), Frame.FromString(NEW_FIELD), END])
    assert wanted.code() is grpc.StatusCode.INVALID_ARGUMENT and "unknown frame" in str(wanted.details())


async def test_a_prompt_of_a_kind_that_is_not_known_is_no_prompt(daemon: Daemon) -> None:
    """It is refused, and not taken for an empty one."""
    asked = generation_pb2.GenerateRequest.FromString(NEW_FIELD)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in daemon.generation.Generate(asked, timeout=30):
            pass
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "prompt" in str(caught.value.details())
