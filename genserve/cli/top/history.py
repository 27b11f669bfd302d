"""What was measured, one sample at a time, of the last few minutes. Pure."""

from collections import deque
from dataclasses import dataclass
from typing import Final

MAX_SAMPLES: Final = 512


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured at one time. None = not known then: nobody answered."""

    tokens_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    prefix_hit_rate: float | None = None
    pushed_bytes_per_s: float | None = None


class History:
    """The last `MAX_SAMPLES` samples, oldest first."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, sample: Sample) -> None:
        """Adds the newest one."""
        self._samples.append(sample)

    def of(self, name: str) -> list[float | None]:
        """One field of all samples."""
        return [getattr(sample, name) for sample in self._samples]
