"""What `genserve up` may be told."""

import pytest

from genserve.placement.config import UpConfig


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_replicas": 0}, "--replicas"),
        ({"num_replicas": 1025}, "--replicas"),
        ({"start_timeout_s": 0.0}, "--start-timeout"),
        ({"start_timeout_s": float("nan")}, "--start-timeout"),
        ({"start_timeout_s": 86401.0}, "--start-timeout"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], says: str) -> None:
    """By the flag that says it."""
    with pytest.raises(ValueError, match=says):
        UpConfig(**{"num_replicas": 1, "flags": [], **settings})  # type: ignore[arg-type]
