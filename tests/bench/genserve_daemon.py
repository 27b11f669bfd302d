"""genserve's daemon with the configuration of all engines."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from tests.bench import engines
from tests.bench.processes import PeerError
from tests.support.daemon_process import DaemonProcess


async def start_daemon(
    checkpoint: Path, directory: Path, stack: AsyncExitStack, *, weight_update: str = "beside"
) -> DaemonProcess:
    """Starts one, which `stack` stops; raises PeerError."""
    flags = ["--model", str(checkpoint), *engines.flags(), "--weight-update", weight_update]
    daemon = DaemonProcess(flags, directory / f"genserve-{weight_update}.log", engines.ENVIRONMENT)
    stack.push_async_callback(asyncio.to_thread, daemon.stop)
    try:
        await asyncio.to_thread(daemon.wait_serving)
    except AssertionError as error:
        raise PeerError(f"genserve ({weight_update})", str(error)) from error
    return daemon
