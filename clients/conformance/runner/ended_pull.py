"""A pull that ends too early, as if all was well."""

from typing import Any

from clients.conformance.runner.relay import Change, Relay
from genserve.v1 import weights_pb2

_PULL = "/genserve.v1.WeightService/PullWeights"


class EndedPull:
    """Ends the first pull with OK after `num_chunks`. Expects that the client asks for the rest of the same version, or
    for nothing if these were all."""

    def __init__(self, num_chunks: int) -> None:
        self._left = num_chunks
        self._header: Any = None
        self._received_bytes = 0
        self._requests: list[Any] = []

    def relay(self, target: str) -> Relay:
        """That does so."""
        return Relay(target, Change(request=self._asked, response=self._passed_on))

    def differences(self) -> list[str]:
        """What did not happen."""
        if self._header is not None and self._received_bytes == self._header.manifest.total_bytes:
            return [] if len(self._requests) == 1 else ["nothing was missing, and the pull was resumed"]
        if len(self._requests) < 2:
            return ["the pull was not resumed"]
        request = self._requests[1]
        asked_for = request.weight_version if request.HasField("weight_version") else "any version"
        found = []
        if asked_for != self._header.weight_version:
            found.append(f"version {self._header.weight_version} was resumed as {asked_for}")
        ranges = [(each.start, each.end) for each in request.ranges]
        if ranges != [(self._received_bytes, self._header.manifest.total_bytes)]:
            found.append(f"{ranges or 'everything'} was pulled after the first {self._received_bytes} bytes")
        return found

    def _asked(self, method: str, message: bytes) -> bytes:
        if method == _PULL:
            self._requests.append(weights_pb2.PullWeightsRequest.FromString(message))
        return message

    def _passed_on(self, method: str, message: bytes) -> bytes | None:
        if method != _PULL or len(self._requests) > 1:
            return message
        frame: Any = weights_pb2.PullWeightsResponse.FromString(message)
        if frame.HasField("header"):
            self._header = frame.header
            return message
        if self._left == 0:
            return None
        self._left -= 1
        self._received_bytes += len(frame.chunk.data)
        return message
