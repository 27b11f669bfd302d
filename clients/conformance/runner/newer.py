"""A daemon that seems to be newer than its clients, and one whose answers are large."""

from typing import Any

from clients.conformance.runner.relay import Change, Relay
from genserve.v1 import control_pb2, generation_pb2

UNKNOWN_ENUM = 99
_GENERATE = "/genserve.v1.GenerationService/Generate"
_STATUS = "/genserve.v1.ControlService/GetStatus"
_WEIGHTS = "/genserve.v1.WeightService/GetWeights"
_UNKNOWN_FIELD = b"\xc2\xb5\x07"  # the tag of a field 15000 of bytes


class Newer:
    """Puts enum values that no client knows yet into answers of Generate and GetStatus, and with `padded_bytes` an
    unknown field of that size into those of GetWeights."""

    def __init__(self, *, padded_bytes: int = 0) -> None:
        self._padded_bytes = padded_bytes
        self._is_done = False

    def relay(self, target: str) -> Relay:
        """That changes the answers."""
        return Relay(target, Change(response=self._padded if self._padded_bytes else self._unknown))

    def differences(self) -> list[str]:
        """What did not happen."""
        return [] if self._is_done else ["no answer was changed"]

    def _padded(self, method: str, message: bytes) -> bytes:
        if method != _WEIGHTS:
            return message
        self._is_done = True
        return message + _UNKNOWN_FIELD + _varint(self._padded_bytes) + bytes(self._padded_bytes)

    def _unknown(self, method: str, message: bytes) -> bytes:
        answer: Any
        if method == _GENERATE:
            answer = generation_pb2.GenerateResponse.FromString(message)
            for output in answer.outputs:
                if output.HasField("finish"):
                    output.finish.reason = UNKNOWN_ENUM
                    self._is_done = True
        elif method == _STATUS:
            answer = control_pb2.GetStatusResponse.FromString(message)
            answer.state.phase = UNKNOWN_ENUM
        else:
            return message
        return bytes(answer.SerializeToString())


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])
