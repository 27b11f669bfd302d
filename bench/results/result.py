"""One measurement as a JSON file, how its rounds are summed up, by medians beside which stands the spread, and cells
of tables that show both."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """`rounds` is raw, `medians` over the rounds, `ratios` to what the measurement names as its ceiling or baseline.
    All three are keyed by size or concurrency, then by peer."""

    name: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    rounds: dict[str, Any]
    medians: dict[str, Any]
    ratios: dict[str, Any]
    notes: dict[str, Any] = field(default_factory=dict)

    def save(self, directory: Path) -> Path:
        """Writes NAME.json."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        path.write_text(json.dumps(rounded(asdict(self)), indent=1) + "\n")
        return path

    @classmethod
    def load(cls, directory: Path, name: str) -> "Result":
        """Reads it."""
        return cls(**json.loads((directory / f"{name}.json").read_text()))

    def range_of(self, key: str, peer: str, figure: str) -> tuple[float, float]:
        """The lowest and the highest of a figure in a round."""
        values = [each[figure] for each in self.rounds[key][peer] if figure in each]
        return min(values), max(values)

    def range_of_ratio(self, key: str, peer: str, figure: str, baseline: str) -> tuple[float, float]:
        """The same for what a figure is of another peer's in the same round."""
        both = zip(self.rounds[key][peer], self.rounds[key][baseline], strict=True)
        ratios = [own[figure] / other[figure] for own, other in both]
        return min(ratios), max(ratios)


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure, over the rounds that have it."""
    names = list(dict.fromkeys(name for each in rounds for name in each))
    return {name: median(each[name] for each in rounds if name in each) for name in names}


def rounded(value: Any) -> Any:
    """Figures to six digits: what is beyond them is noise, and makes files that nobody can read."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return value


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def value(result: Result, key: str, peer: str, figure: str, *, scale: float = 1.0, digits: int = 1) -> str:
    """`27.2 (24.1–31.0)`: the median, and the lowest and the highest of a round; empty if there is no such figure."""
    figures = result.medians[key].get(peer, {})
    if figure not in figures:
        return ""
    low, high = (f"{scale * each:z,.{digits}f}" for each in result.range_of(key, peer, figure))
    return f"{scale * figures[figure]:z,.{digits}f} ({low}–{high})"


def with_ratio(
    result: Result,
    key: str,
    peer: str,
    figure: str,
    ratio: float | None,
    baseline: str,
    *,
    scale: float = 1.0,
    digits: int = 1,
) -> str:
    """`1.87 (0.72; 0.65–0.80)`: the median, what it is of the baseline's, and the lowest and the highest of that in a
    round; only the median if there is no baseline, empty if there is no such figure."""
    if figure not in (figures := result.medians[key].get(peer, {})):
        return ""
    shown = f"{scale * figures[figure]:z,.{digits}f}"
    if ratio is None:
        return shown
    if peer == baseline:
        return f"{shown} (1)"
    low, high = result.range_of_ratio(key, peer, figure, baseline)
    return f"{shown} ({ratio:.2f}; {low:.2f}–{high:.2f})"
