"""The table of scenarios and drivers."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one driver in one scenario: what differed, and what it printed."""

    differences: list[str] = field(default_factory=list)
    results: list[object] = field(default_factory=list)
    is_left_out: bool = False

    @property
    def word(self) -> str:
        """ok, FAILED, or left out, which an optional scenario may be."""
        if self.is_left_out:
            return "left out"
        return "FAILED" if self.differences else "ok"


_MAX_CHARACTERS = 2000


def _short(text: str) -> str:
    """In one line that a terminal can show: a driver may print anything."""
    return " ".join(text[:_MAX_CHARACTERS].splitlines()) + " …" * (len(text) > _MAX_CHARACTERS)


def table(outcomes: dict[str, dict[str, Outcome]], drivers: list[str]) -> str:
    """`outcomes` by scenario and driver; below it what differed."""
    width = max(map(len, [*outcomes, "scenario"]))
    lines = [f"{'scenario':{width}}  " + "  ".join(f"{driver:13}" for driver in drivers)]
    for scenario, by_driver in outcomes.items():
        lines.append(f"{scenario:{width}}  " + "  ".join(f"{by_driver[driver].word:13}" for driver in drivers))
    num_ok = {d: sum(not by_driver[d].differences for by_driver in outcomes.values()) for d in drivers}
    lines.append(f"{'':{width}}  " + "  ".join(f"{f'{num_ok[driver]} of {len(outcomes)}':13}" for driver in drivers))
    for scenario, by_driver in outcomes.items():
        for driver in drivers:
            lines += [f"{scenario}, {driver}: {_short(each)}" for each in by_driver[driver].differences]
    return "\n".join(line.rstrip() for line in lines)
