"""What the measurements by the size of a model share: one size after the other, and the result of all."""

import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import engines, machine
from bench.options import Options
from bench.results.result import Result, medians

Measure = Callable[[str, Path, Path, Options], Awaitable[Any]]
"""Measures a size: its name, its checkpoint, a directory of its own, and the options; the raw rounds."""


@dataclass(slots=True)
class Sizes:
    """`rounds` and `num_bytes` are by the name of the size."""

    name: str
    options: Options
    machine: dict[str, Any] = field(default_factory=machine.facts)
    rounds: dict[str, Any] = field(default_factory=dict)
    num_bytes: dict[str, int] = field(default_factory=dict)

    async def measure(self, measure: Measure, *, models: int, further_bytes: int) -> None:
        """Every size that the options name. Raises MemoryError before one that does not fit: it takes so many `models`
        in memory, and `further_bytes`."""
        for size in self.options.sizes:
            with tempfile.TemporaryDirectory() as directory:
                checkpoint = engines.model(size, Path(directory))
                self.num_bytes[size] = engines.model_bytes(checkpoint)
                machine.require_memory(models * self.num_bytes[size] + further_bytes, f"{self.name} of {size}")
                self.rounds[size] = await measure(size, checkpoint, Path(directory), self.options)

    def medians(self) -> dict[str, dict[str, dict[str, float]]]:
        """By size and by peer, for rounds by peer."""
        return {size: {peer: medians(each) for peer, each in peers.items()} for size, peers in self.rounds.items()}

    def result(self, medians: dict[str, Any], ratios: dict[str, Any], notes: dict[str, Any], **settings: Any) -> Result:
        """With `settings` beside those of every measurement."""
        return Result(
            self.name,
            machine=self.machine,
            settings={
                "engine": engines.flags(),
                "environment": engines.ENVIRONMENT,
                "rounds": self.options.rounds,
                "peers": self.options.peers,
                **settings,
            },
            rounds=self.rounds,
            medians=medians,
            ratios=ratios,
            notes={"bytes": self.num_bytes, **notes},
        )
