"""Ids that a process uses, in memory that another one reads when the process has died.

What a process has passed to a third one has to be taken back after its death. The table is written before an id is
passed on, so none is missing, whenever the process is killed. It may still contain ids that are over.
"""

import mmap
import os
from collections.abc import Container, Iterator
from typing import Self

MAX_ID_BYTES = 1102
"""An id has at most 256 characters, of up to 4 bytes each; vLLM adds a number and 8 random characters."""
_LENGTH_BYTES = 2
_ROW_BYTES = MAX_ID_BYTES + _LENGTH_BYTES
_MIN_ROWS = 256


class IdTable:
    """Rows with one id each. One process writes; any other one that has the descriptor can read. The table grows with
    the number of ids in use, and a row is used again when its id is over."""

    def __init__(self, fd: int) -> None:
        """Maps the table of an inherited descriptor, which this object closes."""
        self.fd = fd
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self._ids: dict[int, str] = {}
        self._free: list[int] = []
        self.clear()

    @classmethod
    def create(cls) -> Self:
        """Makes an empty table."""
        fd = os.memfd_create("genserve-ids")
        os.ftruncate(fd, _MIN_ROWS * _ROW_BYTES)
        return cls(fd)

    def add(self, request_id: str, live: Container[str]) -> None:
        """Writes an id. If there is no free row, those whose ids are not `live` become free. Raises ValueError for an
        id that is too long."""
        data = request_id.encode()
        if len(data) > MAX_ID_BYTES:
            raise ValueError(f"an id of {len(data)} bytes is longer than {MAX_ID_BYTES}")
        if not self._free:
            self._make_room(live)
        row = self._free.pop()
        start = row * _ROW_BYTES
        self._memory[start + _LENGTH_BYTES : start + _LENGTH_BYTES + len(data)] = data
        # A reader takes the row for empty until its length is there.
        self._set_length(row, len(data))
        self._ids[row] = request_id

    def clear(self) -> None:
        """Removes all ids."""
        for row in range(self._num_rows):
            self._set_length(row, 0)
        self._ids.clear()
        self._free = list(range(self._num_rows))

    def close(self) -> None:
        """Unmaps it. May be called again."""
        if self.fd >= 0:
            self._memory.close()
            os.close(self.fd)
            self.fd = -1

    @property
    def _num_rows(self) -> int:
        return len(self._memory) // _ROW_BYTES

    def _set_length(self, row: int, length: int) -> None:
        start = row * _ROW_BYTES
        self._memory[start : start + _LENGTH_BYTES] = length.to_bytes(_LENGTH_BYTES, "little")

    def _make_room(self, live: Container[str]) -> None:
        for row in [row for row, each in self._ids.items() if each not in live]:
            self._set_length(row, 0)
            del self._ids[row]
            self._free.append(row)
        # Half of the rows stay free, so that it takes as many further ids until the next look at all of them.
        if len(self._ids) > self._num_rows // 2:
            first = self._num_rows
            os.ftruncate(self.fd, 2 * first * _ROW_BYTES)
            self._memory.resize(2 * first * _ROW_BYTES)
            self._free += range(first, self._num_rows)


def ids_in(fd: int) -> Iterator[str]:
    """The ids in the table of a process that has died, which may have been killed while it wrote one."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    for start in range(0, len(data) - _ROW_BYTES + 1, _ROW_BYTES):
        length = int.from_bytes(data[start : start + _LENGTH_BYTES], "little")
        if 0 < length <= MAX_ID_BYTES:
            yield data[start + _LENGTH_BYTES : start + _LENGTH_BYTES + length].decode(errors="replace")
