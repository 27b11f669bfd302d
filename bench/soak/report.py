"""What a soak has seen, and what of it is wrong."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

MAX_GROWTH_BYTES = 100 * 10**6
"""Of the private memory of all processes together, from the middle on."""
_TENTH = 10


@dataclass(frozen=True)
class Sample:
    """One moment, `at_s` after the beginning. By the name of each process: its resident and private bytes, open files
    and threads. Latencies are those of the requests that ended since the sample before, None if none has."""

    at_s: float
    rss_bytes: dict[str, int]
    private_bytes: dict[str, int]
    open_files: dict[str, int]
    threads: dict[str, int]
    shared_files: int
    arena_bytes: int
    weight_version: int
    running: int
    waiting: int
    num_requests: int
    p50_s: float | None
    p99_s: float | None


@dataclass
class Report:
    """`outcomes` counts how calls ended, `wrong` says what may not happen; both are bounded. `findings` are those of
    the oracle at the end."""

    settings: dict[str, Any]
    machine: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    push_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    findings: dict[str, str] = field(default_factory=dict)

    def is_wrong(self, what: str) -> None:
        """Notes something that may not happen; the first hundred are kept."""
        self.outcomes["wrong"] += 1
        if len(self.wrong) < 100:
            self.wrong.append(what)

    @property
    def growth_bytes(self) -> int:
        """Of the private memory of all processes, from the tenth of the time after the middle to the last tenth."""
        totals = [sum(sample.private_bytes.values()) for sample in self.samples]
        width = max(1, len(totals) // _TENTH)
        middle = len(totals) // 2
        return round(mean(totals[-width:]) - mean(totals[middle : middle + width]))

    @property
    def faults(self) -> list[str]:
        """What is wrong; nothing if the daemon has passed."""
        found = [*self.wrong, *(f"oracle: {name}: {finding}" for name, finding in self.findings.items())]
        if self.growth_bytes > MAX_GROWTH_BYTES:
            found.append(f"memory grew by {self.growth_bytes / 1e6:.0f} MB from the middle on")
        return found

    def summary(self) -> str:
        """For people."""
        latencies = [sample.p99_s for sample in self.samples if sample.p99_s is not None]
        lines = [
            f"{len(self.samples)} samples, {len(self.push_s)} pushes applied in {max(self.push_s, default=0):.2f} s at "
            f"most, requests' p99 at most {max(latencies, default=0):.2f} s",
            f"growth from the middle on: {self.growth_bytes / 1e6:.1f} MB",
            *(f"{name}: {count}" for name, count in sorted(self.outcomes.items())),
            *(f"WRONG: {fault}" for fault in self.faults),
        ]
        return "\n".join(lines if self.faults else [*lines, "the oracle holds"])

    def save(self, path: Path) -> None:
        """As JSON."""
        fields = {**vars(self), "growth_bytes": self.growth_bytes, "faults": self.faults}
        fields["samples"] = [asdict(sample) for sample in self.samples]
        path.write_text(json.dumps(fields, indent=1) + "\n")
