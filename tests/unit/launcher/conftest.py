"""The fake daemon."""

from pathlib import Path

import pytest

from tests.support import fake_daemon


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """The environment in which it is found as genserve."""
    return fake_daemon.install(tmp_path / "fake")
