"""The ways to take new versions that the doctor tries."""

from genserve.errors import InvalidFieldError
from genserve.settings.config import ways


def chosen(asked: str | None, device_type: str) -> tuple[str, ...]:
    """The requested ways, separated by commas, or all that the device has. Raises InvalidFieldError."""
    known = ways(device_type)
    if asked is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in asked.split(",")))
    for name in names:
        if name not in known:
            raise InvalidFieldError.of("ways", f"{name!a} is not one of {', '.join(known)}")
    return names
