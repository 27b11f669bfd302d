"""Tests with a CUDA runtime that is fake: `scripts/test --fake-cuda`. All are skipped elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_cuda import runtime


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips where CUDA is not fake."""
    if runtime.is_here():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs the fake CUDA runtime: scripts/test --fake-cuda"))


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """See `workers.engine`."""
    from tests.support.fake_cuda import workers

    with workers.engine(tmp_path_factory.mktemp("engine")):
        yield
