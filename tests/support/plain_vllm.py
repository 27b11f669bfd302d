"""What plain vLLM says, in an engine of its own."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.warm import process

PROMPTS = [[5, 6, 7, 8], [100, 200, 300], list(range(10, 60))]
Reference = dict[str, Any]


def plain_vllm(checkpoint: Path, tensor_parallel_size: int = 1) -> Reference:
    """What plain vLLM says about a checkpoint, in an engine of its own."""
    program = [sys.executable, "-m", "tests.support.reference", str(checkpoint), json.dumps(PROMPTS)]
    program.append(str(tensor_parallel_size))
    done = process.run(program, timeout=240)
    lines = [line for line in done.stdout.splitlines() if line.startswith("REFERENCE ")]
    assert lines, done.stderr[-4000:]
    result: Reference = json.loads(lines[0].removeprefix("REFERENCE "))
    return result
