"""genserve's daemon with the configuration of all engines."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench import engines
from bench.processes import PeerError
from tests.support.daemon_process import DaemonProcess


async def start_daemon(
    checkpoint: Path,
    directory: Path,
    stack: AsyncExitStack,
    *,
    weight_update: str = "beside",
    flags: Sequence[str] = (),
) -> DaemonProcess:
    """Starts one with further flags, which `stack` stops; raises PeerError."""
    flags = ["--weight-update", weight_update, *flags]
    log = directory / f"genserve{'-'.join(flags)}.log"
    daemon = DaemonProcess(["--model", str(checkpoint), *engines.flags(), *flags], log, engines.ENVIRONMENT)
    stack.push_async_callback(asyncio.to_thread, daemon.stop)
    try:
        await asyncio.to_thread(daemon.wait_serving)
    except AssertionError as error:
        raise PeerError(f"genserve ({' '.join(flags)})", str(error)) from error
    return daemon
