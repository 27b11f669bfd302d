"""Whether a driver pushes over several streams."""

from typing import Any

from clients.conformance.runner.relay import Relay
from genserve.v1 import weights_pb2

_PUSH = "/genserve.v1.WeightService/PushWeights"


class PushStreams:
    """Expects a push of one attempt over so many streams, each with a part of the bytes."""

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self._headers: list[Any] = []
        self._with_bytes: set[Any] = set()

    def relay(self, target: str) -> Relay:
        """That sees them."""
        return Relay(target, saw=self._saw)

    def differences(self) -> list[str]:
        """What did not happen."""
        found = []
        if len(self._headers) != self._num_streams:
            found.append(f"there were {len(self._headers)} streams, not {self._num_streams}")
        if len(self._with_bytes) < len(self._headers):
            found.append(f"{len(self._with_bytes)} of {len(self._headers)} streams brought bytes")
        if len({(header.push_id, header.attempt) for header in self._headers}) > 1:
            found.append("the streams were not of one push and attempt")
        return found

    def _saw(self, method: str, stream: Any, message: bytes) -> None:
        if method != _PUSH:
            return
        frame: Any = weights_pb2.PushWeightsRequest.FromString(message)
        if frame.HasField("header"):
            self._headers.append(frame.header)
        elif frame.chunk.data:
            self._with_bytes.add(stream)
