"""A byte of a push that changes on its way."""

from clients.conformance.runner.relay import Change
from genserve.v1 import weights_pb2

_PUSH = "/genserve.v1.WeightService/PushWeights"


class CorruptChunk:
    """Changes a byte in chunk `number` of a push, once."""

    def __init__(self, number: int) -> None:
        self._left = number
        self._is_done = False

    def differences(self) -> list[str]:
        """What did not happen."""
        return [] if self._is_done else ["no chunk was changed"]

    def change(self) -> Change:
        """For a relay."""
        return Change(request=self._request)

    def _request(self, method: str, message: bytes) -> bytes:
        if method != _PUSH or self._is_done:
            return message
        request = weights_pb2.PushWeightsRequest.FromString(message)
        if not request.HasField("chunk"):
            return message
        self._left -= 1
        if self._left >= 0:
            return message
        self._is_done = True
        data = bytearray(request.chunk.data)
        data[len(data) // 2] ^= 1
        request.chunk.data = bytes(data)
        return request.SerializeToString()
