"""Commands in this process, and in processes of their own."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

Outcome = tuple[int, str, str]
"""Exit status, stdout and stderr."""
Command = Callable[..., Awaitable[Outcome]]


async def start(target: str, *arguments: str, stdout: int = asyncio.subprocess.PIPE) -> Any:
    """Starts a command as a process of its own.

    A test run in the background of a shell ignores SIGINT, and the command would do so too. It is told there and not
    between fork and exec: what gRPC does in a forked process may close the command's pipes.
    """
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from genserve.cli import main; sys.exit(main())"
    )
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, "--target", target,
        stdout=stdout, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
