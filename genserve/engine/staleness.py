"""How far behind the served version tokens were, in classes."""

from bisect import bisect_left
from typing import Final

CLASSES: Final = ("0", "1", "2", "3", "4", "5-8", "9-16", "17+")
"""Versions between the one that a token was sampled under and the one that is served when its sequence ends."""
_LAST = (0, 1, 2, 3, 4, 8, 16)


def class_of(num_versions: int) -> int:
    """The index of the class. A version with a lower number that was forced is not behind."""
    return bisect_left(_LAST, num_versions)
