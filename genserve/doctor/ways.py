"""The ways to take new versions that are tried."""

from genserve.config import ways
from genserve.errors import InvalidFieldError


def chosen(asked: str | None, device_type: str) -> tuple[str, ...]:
    """Those that are asked for, separated by commas, or all that differ on that device. Raises InvalidFieldError."""
    known = ways(device_type)
    if asked is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in asked.split(",")))
    for name in names:
        if name not in known:
            raise InvalidFieldError.of("ways", f"{name!a} is not one of {', '.join(known)}")
    return names
