"""What `genserve up` may be told."""

import pytest

from genserve.placement.config import UpConfig, flags_of_replica


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


@pytest.mark.parametrize("given", [["--keep-committed", "/d"], ["--keep-committed=/d"], ["--keep_committed", "/d"]])
def test_each_replica_keeps_its_version_in_its_own_directory(given: list[str]) -> None:
    """Beneath the one that all are given; of several flags the last one counts."""
    flags = ["--model", "m", *given]
    assert flags_of_replica(flags, 3) == [*flags, "--keep-committed=/d/replica-3"]
    assert flags_of_replica(["--model", "m"], 3) == ["--model", "m"]
