"""The example of docs/training.md that launches its daemon, with a real one; only the path and sizes are others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from genserve.launcher.process_group import members_of
from tests.engine.examples import block
from tests.support.warm import process

GUIDE = Path(__file__).parents[2] / "docs" / "training.md"
AROUND = """
import sys
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({checkpoint!r}, dtype=torch.float32)
prompts = ["a b c"]
{example}
print("pid", server.pid, "exit status", server.exit_status, "vllm" in sys.modules)
"""


@pytest.mark.parametrize(
    "is_cold",
    [False, pytest.param(True, marks=pytest.mark.long("genserve/launcher", "genserve/cli", "docs/training.md"))],
)
def test_a_trainer_launches_its_daemon_pushes_to_it_and_ends_it(learner: Path, is_cold: bool) -> None:
    """Nothing of it is left, and it has drained. A trainer that starts as a user's does has not imported vLLM."""
    example = block("python", "genserve.launch", GUIDE).replace("path/to/checkpoint", str(learner))
    example = example.replace("max_model_len=2048", f"max_model_len=512, kv_cache_memory_bytes={64 << 20}")
    program = AROUND.format(checkpoint=str(learner), example=example)
    command = [sys.executable, "-c", program]
    if is_cold:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    else:
        done = process.run(command, timeout=240)
    assert done.returncode == 0, done.stderr
    # It samples, so the model may end the answer at once: the text is empty then.
    assert re.search(r"^127\.0\.0\.1:\d+ [a-z ]*$", done.stdout, re.MULTILINE), done.stdout
    ended = re.search(r"^pid (\d+) exit status 0 (False|True)$", done.stdout, re.MULTILINE)
    assert ended is not None, done.stdout
    assert members_of(int(ended[1])) == []
    assert ended[2] == "False" or not is_cold
    assert "Warning" not in done.stderr
