"""What replicas do instead of serving, for the error of a request that none may serve. Pure."""

from collections.abc import Mapping
from typing import Final

_MAX_NAMED: Final = 4
"""An error's message has 600 bytes on the wire."""


def with_reasons(why: str, reasons: Mapping[str, str]) -> str:
    """`why` none may, and behind it why each replica is not ready. `reasons`: by addresses, "" = it is."""
    told = [f"{address}: {reason}" for address, reason in sorted(reasons.items()) if reason]
    if not told:
        return why
    more = f"; and {len(told) - _MAX_NAMED} more" if len(told) > _MAX_NAMED else ""
    return f"{why} ({'; '.join(told[:_MAX_NAMED])}{more})"
