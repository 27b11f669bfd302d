"""Daemons that tests start: how long they may take."""

from pathlib import Path

import pytest

from tests.support import daemon_process
from tests.support.daemon_process import DaemonProcess


def test_a_start_has_the_time_that_the_module_says_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on a GPU raise it, because kernels are compiled at a first start."""
    monkeypatch.setattr(daemon_process, "START_TIMEOUT_S", 0.0)
    daemon = DaemonProcess(["--model", str(tmp_path)], tmp_path / "log", cold=True)
    with pytest.raises(AssertionError, match="did not serve within 0 s and was killed"):
        daemon.wait_serving()


@pytest.mark.slow
def test_a_daemon_that_starts_too_slowly_is_not_one_that_ended(tmp_path: Path) -> None:
    """It was killed here: whoever reads -9 would look for what has killed it."""
    daemon = DaemonProcess(["--model", str(tmp_path)], tmp_path / "log")
    with pytest.raises(AssertionError, match="did not serve within 0 s and was killed"):
        daemon.wait_serving(0)
