"""vLLM's executor on Ray, which no test can run: its CPU build has none."""

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from genserve.engine.vllm.start.refusals import TABLE


def test_the_present_one_is_taken_and_the_older_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes the older one says so in the environment."""
    (row,) = [row for row in TABLE if row.name == "ray-workers"]
    flags = SimpleNamespace(distributed_executor_backend="ray")
    monkeypatch.delenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", raising=False)
    assert not row.applies(flags)
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    assert row.applies(flags)


def test_the_present_one_is_that_of_several_processes() -> None:
    """With actors for processes: calls reach workers between their steps, in the same order."""
    spec = find_spec("vllm.v1.executor.ray_executor_v2")  # to import it takes Ray
    assert spec is not None and spec.origin is not None
    module = ast.parse(Path(spec.origin).read_text())
    classes = {each.name: each for each in module.body if isinstance(each, ast.ClassDef)}
    executor = classes["RayExecutorV2"]
    assert [ast.unparse(base) for base in executor.bases] == ["MultiprocExecutor"]
    assert "collective_rpc" not in {each.name for each in executor.body if isinstance(each, ast.FunctionDef)}
    assert [ast.unparse(base) for base in classes["RayWorkerProc"].bases] == ["WorkerProc"]
