"""The example of docs/training.md that launches its daemon, with a real one that starts as a user's does, every module
newly imported; only the path and sizes are others."""

import re
import subprocess
import sys
from pathlib import Path

from genserve.launcher.process_group import members_of
from tests.engine.examples import block

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


def test_a_trainer_launches_its_daemon_pushes_to_it_and_ends_it(learner: Path) -> None:
    """Nothing of it is left, and it has drained."""
    example = block("python", "genserve.launch", GUIDE).replace("path/to/checkpoint", str(learner))
    example = example.replace("max_model_len=2048", f"max_model_len=512, kv_cache_memory_bytes={64 << 20}")
    program = AROUND.format(checkpoint=str(learner), example=example)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^127\.0\.0\.1:\d+ [a-z ]+$", done.stdout, re.MULTILINE), done.stdout
    ended = re.search(r"^pid (\d+) exit status 0 False$", done.stdout, re.MULTILINE)
    assert ended is not None, done.stdout
    assert members_of(int(ended[1])) == []
    assert "Warning" not in done.stderr
