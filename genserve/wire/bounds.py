"""Bounds of what several services take. Pure."""

from typing import Final

from genserve.errors import InvalidFieldError

MAX_TEXT_CHARS: Final = 256
MIN_WATCH_INTERVAL_S: Final = 0.1
"""Between two reports to a client that watches a daemon or a router."""
MAX_PEERS: Final = 64
"""Daemons that one LoadWeights may name to fetch a version from."""
MAX_REPLICAS: Final = 1024
"""Replicas that a router takes. A client that calls them itself has a connection to each of them."""
MAX_ABORTED_SEQUENCES: Final = 1 << 14
"""In the answer to a request that ended before an engine checked its n. No daemon takes a request for more."""


def check_text(text: str, field: str) -> None:
    """Raises InvalidFieldError for an id or a name that is longer than 256 characters or not printable. Others see
    it."""
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidFieldError.of(field, f"must have at most {MAX_TEXT_CHARS} characters, has {len(text)}")
    if not text.isprintable():
        raise InvalidFieldError.of(field, "must be printable")
