"""Sizes, rates and times as people read them: GB are 10^9 bytes. Pure."""

from datetime import datetime
from typing import Final

_UNITS: Final = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def size_text(size_bytes: float, unit: str = "") -> str:
    """`1.26 GB`, `269 MB`; in a unit that is given without its name."""
    name, scale = next((each for each in _UNITS if each[0] == unit or (not unit and size_bytes >= each[1])), _UNITS[-1])
    number = size_bytes / scale
    digits = 2 if number < 10 and scale > 1 else 1 if number < 100 and scale > 1 else 0
    return f"{number:.{digits}f}" if unit else f"{number:.{digits}f} {name}"


def sizes_text(part_bytes: int, total_bytes: int) -> str:
    """`0.16/1.26 GB`: both in the unit of the second."""
    total = size_text(total_bytes)
    return f"{size_text(part_bytes, total.rpartition(' ')[2])}/{total}"


def share_text(part: float, total: float) -> str:
    """`61%`, rounded down: 100% only if nothing is missing."""
    return "100%" if part >= total else f"{int(100 * part / total)}%"


def mean_rate(received_bytes: int, begin: datetime | None, now: datetime) -> float | None:
    """Bytes per second since `begin`; None if that is not known or no time has passed."""
    elapsed_s = 0.0 if begin is None else (now - begin).total_seconds()
    return received_bytes / elapsed_s if elapsed_s > 0 else None


def rate_text(bytes_per_s: float) -> str:
    """`1.26 GB/s`, `0.02 GB/s`, `3.1 MB/s`: in GB as long as two digits tell something."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e7 else f"{bytes_per_s / 1e6:.1f} MB/s"


def age_text(seconds: float) -> str:
    """`3 s`, `12 min`, `3 h 5 min`, `2 d 4 h`, rounded down."""
    whole = max(0, int(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 2:
        return f"{whole} s"
    if hours < 2:
        return f"{minutes} min"
    if days < 2:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"
