"""Reads a safetensors file, and lays its tensors out for a push."""

import json
from collections.abc import Iterator, Sequence

from genserve.v1 import weights_pb2

CHUNK_BYTES = 1 << 20


class Checkpoint:
    """The tensors of a file, one after the other in order of their places in the file."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            self._data = file.read()
        header.pop("__metadata__", None)
        self._tensors = sorted(header.items(), key=lambda item: (item[1]["data_offsets"], item[0]))
        self.total_bytes = len(self._data)

    def manifest(self, partial: bool) -> weights_pb2.Manifest:
        """Names, types, shapes and places. Places in the byte space are those in the file's data."""
        specs = []
        for name, tensor in self._tensors:
            start, end = tensor["data_offsets"]
            specs.append(
                weights_pb2.TensorSpec(
                    name=name, dtype=tensor["dtype"], shape=tensor["shape"], offset=start, length=end - start
                )
            )
        return weights_pb2.Manifest(tensors=specs, total_bytes=self.total_bytes, partial=partial)

    def chunks(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, bytes]]:
        """The bytes of ranges [start, end) of the byte space, each chunk with the place of its first byte."""
        for start, end in ranges:
            for offset in range(start, end, CHUNK_BYTES):
                yield offset, self._data[offset : min(offset + CHUNK_BYTES, end)]
