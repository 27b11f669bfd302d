"""The drivers of this repository, and one run of a driver."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / "clients"
TIMEOUT_S = 60.0
DRIVERS: dict[str, tuple[str, ...]] = {
    "python-stubs": (sys.executable, "-m", "clients.conformance.drivers.python_stubs"),
    "python-client": (sys.executable, "-m", "clients.conformance.drivers.python_client"),
    "typescript": (str(CLIENTS / "typescript/scripts/run"), "conformance/driver.ts"),
}


async def results_of(command: Sequence[str], scenario: dict[str, Any]) -> list[Any]:
    """What a driver prints: one value a line. Raises RuntimeError if it fails or takes too long."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, errors = await process.communicate(json.dumps(scenario).encode())
    except TimeoutError:
        raise RuntimeError(f"the driver took more than {TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:  # late, or the runner is interrupted
            process.kill()
            await process.wait()
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError(f"the driver ended with {process.returncode}: {' | '.join(last)}")
    try:
        return [json.loads(line) for line in output.splitlines()]
    except ValueError as error:
        raise RuntimeError(f"the driver printed what is no JSON: {error}") from None
