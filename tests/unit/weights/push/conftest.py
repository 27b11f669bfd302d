"""Copies of handed-over memory that a test holds up."""

from collections.abc import Iterator

import pytest

from tests.unit.weights.push.handed_over import Copying


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copying]:
    copying = Copying(monkeypatch)
    yield copying
    copying.let_go.release(100)
