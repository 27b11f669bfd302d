"""A device that keeps addresses, on the CPU."""

import torch

from genserve.worker.update.device import Device


class KeptDevice(Device):
    """Copies as it is told to: `fails_at` is the number of the copy that finds no memory, `copies` counts them."""

    keeps_addresses = True

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__(torch.device("cpu"))
        self.fails_at = fails_at
        self.log: list[str] = []

    @property
    def copies(self) -> int:
        """How many there were."""
        return self.log.count("copy")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """As a GPU would, or not."""
        if self.copies == self.fails_at:
            self.fails_at = -1
            target.fill_(float("nan"))  # what a copy has begun is not known
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.log.append("copy")
        super().copy(target, source)

    def synchronize(self) -> None:
        """Noted."""
        self.log.append("synchronize")
