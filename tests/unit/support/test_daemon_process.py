"""Daemons that tests start."""

from pathlib import Path

import pytest

from tests.support.daemon_process import DaemonProcess


def test_a_daemon_that_starts_too_slowly_is_not_one_that_ended(tmp_path: Path) -> None:
    """It was killed here: whoever reads -9 would look for what has killed it."""
    daemon = DaemonProcess(["--model", str(tmp_path)], tmp_path / "log")
    with pytest.raises(AssertionError, match="did not serve within 0 s and was killed"):
        daemon.wait_serving(0)
