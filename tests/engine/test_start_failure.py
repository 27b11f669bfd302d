"""When the engine cannot start, the last line of the daemon is the reason, in the words of the process that failed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import models
from tests.support.daemon_process import BOTH_CORES, SMALL_ENGINE
from tests.support.ports import free_port
from tests.support.warm.process import WarmPopen

pytestmark = pytest.mark.long(
    "genserve/engine/vllm/start",
    "genserve/engine/vllm/launch.py",
    "genserve/engine/vllm/engine.py",
    "genserve/daemon",
    "genserve/process",
)


def truncated(checkpoint: Path) -> None:
    """Cuts the weights in their middle, as a copy that broke off."""
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def unserved(checkpoint: Path) -> None:
    """Heads of a size that vLLM loads, warms up with, and has no kernel for on the CPU."""
    models.tiny_qwen2(checkpoint, num_heads=8, head_dim=16)


def unknown(checkpoint: Path) -> None:
    """A kind of model that nobody knows."""
    (checkpoint / "config.json").write_text('{"model_type": "no-such-model"}')


def whole(checkpoint: Path) -> None:
    """Leaves it."""


STARTS: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    # A worker fails, and the engine's process says only that one did.
    "truncated weights": (truncated, ["--tensor-parallel-size", "2"], "SafetensorError: "),
    # The engine's process fails.
    "no memory for keys and values": (whole, ["--kv-cache-memory-bytes", "1000"], ": No available memory"),
    # Every process has started, and a request would end the engine. With two ranks EngineCore has a worker's words.
    "a step that fails": (unserved, [], "first step: RuntimeError: "),
    "a step that fails in a worker": (unserved, ["--tensor-parallel-size", "2"], "first step: RuntimeError: "),
    # No process has started. The last line of vLLM's own words is the address of a page about validation.
    # Nor here: genserve.engine.vllm.start.refusals does, and these are rows of it.
    "weights in host memory": (whole, ["--cpu-offload-gb", "1"], "[weights-offloaded-to-host]"),
    "workers that cannot reach the daemon": (
        whole,
        ["--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "10.99.0.1", "--port", str(free_port())],
        "--host 127.0.0.1",
    ),
    "no model": (unknown, [], "no-such-model"),
    "a flag that vLLM refuses": (whole, ["--max-model-len", "100000000"], "max_model_len"),
}

REFUSED = ("weights in host memory", "workers that cannot reach the daemon", "a flag that vLLM refuses", "no model")
"""No start would end otherwise: `genserve up` does not try another one."""


@pytest.fixture(scope="module")
def started(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, "subprocess.Popen[str]"]]:
    """A daemon for each. All start at once."""
    processes = {}
    try:
        for name, (breaks, flags, _) in STARTS.items():
            checkpoint = Path(shutil.copytree(checkpoints["a"], tmp_path_factory.mktemp("broken") / "checkpoint"))
            breaks(checkpoint)
            command = [sys.executable, "-m", "genserve", "serve", "--port", "0", "--model", str(checkpoint)]
            processes[name] = WarmPopen(
                [*command, *SMALL_ENGINE, *flags],
                env={**os.environ, **BOTH_CORES},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize("name", STARTS)
def test_the_last_line_is_the_root_cause(started: dict[str, "subprocess.Popen[str]"], name: str) -> None:
    """And not that there is one above it."""
    _, stderr = started[name].communicate(timeout=280)
    assert started[name].returncode == (2 if name in REFUSED else 1)
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("genserve: "), stderr[-3000:]
    assert STARTS[name][2] in last, stderr[-3000:]
    assert "root cause" not in last
