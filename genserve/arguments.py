"""Bounds of arguments that several services take. Pure."""

from genserve.errors import InvalidFieldError

MAX_TEXT_CHARS = 256


def check_text(text: str, field: str) -> None:
    """Raises InvalidFieldError for an id or a name that is longer than 256 characters or not printable. Others see
    it."""
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidFieldError.of(field, f"must have at most {MAX_TEXT_CHARS} characters, has {len(text)}")
    if not text.isprintable():
        raise InvalidFieldError.of(field, "must be printable")


def check_timeout(timeout_s: float, field: str = "timeout") -> None:
    """Raises InvalidFieldError unless the time is above 0."""
    if not timeout_s > 0:
        raise InvalidFieldError.of(field, f"must be above 0 s, is {timeout_s:g} s")
