"""The ways in which a daemon can take new versions: the one list of those that are tried."""

from typing import Final

from genserve.config import WEIGHT_UPDATES
from genserve.errors import InvalidFieldError

_CHOOSES: Final = "auto"
_ON_CUDA_ALONE: Final = frozenset({"host"})  # on a CPU the live model lies in host memory anyway


def ways(device_type: str) -> tuple[str, ...]:
    """Every value of `--weight-update` that says how, and makes a difference on that device."""
    told = (way for way in WEIGHT_UPDATES if way != _CHOOSES)
    return tuple(way for way in told if device_type == "cuda" or way not in _ON_CUDA_ALONE)


def chosen(asked: str | None, device_type: str) -> tuple[str, ...]:
    """Those that are asked for, separated by commas, or all. Raises InvalidFieldError."""
    known = ways(device_type)
    if asked is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in asked.split(",")))
    for name in names:
        if name not in known:
            raise InvalidFieldError.of("ways", f"{name!a} is not one of {', '.join(known)}")
    return names
