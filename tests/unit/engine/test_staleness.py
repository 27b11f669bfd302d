"""Classes of staleness."""

import pytest

from genserve.engine.staleness import CLASSES, class_of


@pytest.mark.parametrize(
    ("num_versions", "name"),
    [
        (-3, "0"),
        (0, "0"),
        (1, "1"),
        (4, "4"),
        (5, "5-8"),
        (8, "5-8"),
        (9, "9-16"),
        (16, "9-16"),
        (17, "17+"),
        (99, "17+"),
    ],
)
def test_each_number_of_versions_is_in_the_class_that_its_name_says(num_versions: int, name: str) -> None:
    """The last class has no end, and a version that was forced back is not behind."""
    assert CLASSES[class_of(num_versions)] == name
