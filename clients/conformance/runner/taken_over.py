"""A push that somebody else takes over, under another attempt."""

from typing import Any

import grpc
import grpc.aio

from clients.conformance.runner.relay import Relay
from genserve.v1 import weights_pb2, weights_pb2_grpc

_PUSH = "/genserve.v1.WeightService/PushWeights"
_ATTEMPT = "of another trainer"
_UNLIMITED = (("grpc.max_send_message_length", -1),)


class TakenOver:
    """Breaks the first push off when `num_bytes` of it have come, or with None at its end frame, and sends what had
    come, and the end if that had, under another attempt. Expects that the client sends everything then, at
    once."""

    def __init__(self, daemon: str, num_bytes: int | None) -> None:
        self._daemon = daemon
        self._num_bytes = num_bytes
        self._frames: list[Any] = []
        self._come_bytes = 0
        self._is_taken_over = False
        self._num_streams = 0
        self._sent_bytes = 0
        self._answer: grpc.StatusCode | None = None

    def relay(self, target: str) -> Relay:
        """That does so."""
        return Relay(target, breaks=self._breaks, broken=self._take_over)

    def differences(self) -> list[str]:
        """What did not happen."""
        if not self._is_taken_over:
            return ["the push was not taken over: it ended before"]
        # Without an end it is truncated, which the daemon answers when it has read everything else.
        if self._answer is not (grpc.StatusCode.OK if self._num_bytes is None else grpc.StatusCode.ABORTED):
            return [f"the daemon answered {self._answer} to the other attempt"]
        whole_bytes = self._frames[0].header.manifest.total_bytes
        if self._num_streams != 1 or self._sent_bytes < whole_bytes:
            told = f"{self._sent_bytes} bytes of {whole_bytes} were sent over {self._num_streams} streams"
            return [f"{told} after another attempt had taken the push over, not everything over one"]
        return []

    def _breaks(self, method: str, message: bytes) -> bool:
        if method != _PUSH:
            return False
        frame: Any = weights_pb2.PushWeightsRequest.FromString(message)
        if self._is_taken_over:
            self._num_streams += frame.HasField("header")
            self._sent_bytes += len(frame.chunk.data)
            return False
        self._frames.append(frame)
        self._come_bytes += len(frame.chunk.data)
        if self._num_bytes is None:
            self._is_taken_over = frame.HasField("end")
        else:
            self._is_taken_over = self._come_bytes >= self._num_bytes
        return self._is_taken_over

    async def _take_over(self) -> None:
        self._frames[0].header.attempt = _ATTEMPT
        async with grpc.aio.insecure_channel(self._daemon, _UNLIMITED) as channel:
            stub: Any = weights_pb2_grpc.WeightServiceStub(channel)
            self._answer = await stub.PushWeights(iter(self._frames)).code()
