"""A daemon beside the trainer, for those who have none running."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def local_daemon(model: str | None, dtype: str) -> AsyncIterator[tuple[str, str]]:
    """A daemon for as long as this is open: its address and the name of what it serves.

    `model`: a checkpoint's directory or its name on the hub; None = the built-in one. `dtype`: float32 or bfloat16.
    """
    command = [sys.executable, "-m", "genserve", "serve", "--port", "0", "--dtype", dtype, "--max-model-len", "512"]
    command += ["--kv-cache-memory-bytes", str(512 << 20), *(["--model", model] if model is not None else [])]
    # A group of its own: an interrupt is the trainer's, who ends the daemon.
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, process_group=0)
    try:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(b"genserve: serving "):
                served, address = line.decode().strip().removeprefix("genserve: serving ").rsplit(" on ", 1)
                yield address, served
                return
        raise SystemExit("the daemon did not start")
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
