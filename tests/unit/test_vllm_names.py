"""scripts/vllm_names.py, on a vLLM of two modules: what it prints is what `scripts/vllm-next` compares."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "vllm_names.py"
SAMPLING = """
class SamplingParams:
    def __init__(self, n, best_of=1): ...
    @classmethod
    def from_optional(cls, n): ...
"""
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.99.0\nRequires-Dist: packaging>=1\nRequires-Dist: not-here\n"


@pytest.mark.slow
def test_parameters_requirements_and_imports_that_are_gone_are_printed(tmp_path: Path) -> None:
    """Each has a line. A package that is not installed has none."""
    files = {
        "vllm/__init__.py": "",
        "vllm/sampling_params.py": SAMPLING,
        "vllm-0.99.0.dist-info/METADATA": METADATA,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    params = "vllm.sampling_params.SamplingParams"
    assert [line for line in lines if line.startswith(params)] == [
        *(params, f"{params}(n)", f"{params}(best_of)"),
        f"{params}.from_optional(cls, n)",
    ]
    gone = "vllm.sampling_params.StructuredOutputsParams: "
    assert [line.removeprefix(gone).partition(":")[0] for line in lines if line.startswith(gone)] == [
        "ModuleNotFoundError"
    ]
    assert [line for line in lines if line.startswith("requires ")] == ["requires packaging>=1"]
