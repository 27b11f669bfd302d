"""A byte of a push or a pull that changes on its way."""

from typing import Any, Literal

from clients.conformance.runner.relay import Change, Relay
from genserve.v1 import weights_pb2

_METHODS: dict[str, tuple[str, Any]] = {
    "push": ("/genserve.v1.WeightService/PushWeights", weights_pb2.PushWeightsRequest),
    "pull": ("/genserve.v1.WeightService/PullWeights", weights_pb2.PullWeightsResponse),
}


class CorruptChunk:
    """Changes a byte in chunk `number` of a push or a pull, once."""

    def __init__(self, number: int, of: Literal["push", "pull"]) -> None:
        self._left = number
        self._is_done = False
        self._is_push = of == "push"
        self._method, self._frame = _METHODS[of]

    def differences(self) -> list[str]:
        """What did not happen."""
        return [] if self._is_done else ["no chunk was changed"]

    def relay(self, target: str) -> Relay:
        """That does so."""
        return Relay(target, Change(request=self._changed) if self._is_push else Change(response=self._changed))

    def _changed(self, method: str, message: bytes) -> bytes:
        if method != self._method or self._is_done:
            return message
        frame: Any = self._frame.FromString(message)
        if not frame.HasField("chunk"):
            return message
        self._left -= 1
        if self._left >= 0:
            return message
        self._is_done = True
        data = bytearray(frame.chunk.data)
        data[len(data) // 2] ^= 1
        frame.chunk.data = bytes(data)
        return bytes(frame.SerializeToString())
