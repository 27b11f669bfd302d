"""How many bytes of a push have arrived, for workers that begin with its first tensors.

The number is the size of a memory file that nobody writes to: it takes no memory, and the kernel reads and changes it
as a whole. Workers import this module: it needs only the standard library.
"""

import os


class Arrival:
    """The daemon's side. Made with 0 bytes."""

    def __init__(self) -> None:
        """Raises OSError if the process has too many files open."""
        self._fd = os.memfd_create("genserve-arrival", os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)

    @property
    def path(self) -> str:
        """The path for `ArrivedBytes` in a worker."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def tell(self, num_bytes: int) -> None:
        """Records that so many bytes have arrived, from the first one on without a gap."""
        if self._fd != -1:
            os.ftruncate(self._fd, num_bytes)

    def close(self) -> None:
        """Safe to call more than once; workers that have opened it keep the last number."""
        fd, self._fd = self._fd, -1
        if fd != -1:
            os.close(fd)


class ArrivedBytes:
    """A worker's side, open for the length of a block."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the daemon has closed it."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def num_bytes(self) -> int:
        """How many have arrived, without a gap."""
        return os.fstat(self._fd).st_size

    def __enter__(self) -> "ArrivedBytes":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
