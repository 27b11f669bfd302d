"""The process that talks to Ray. Its argument is a Task; its stdout has a line for each change of the replicas.

It is told to end by SIGTERM, which the kernel sends when the router's process has ended.
"""

import asyncio
import os
import signal
import sys
import traceback
from typing import Final

import ray

from genserve.observe.notices import say
from genserve.placement.ray.cluster import RayFailedError, connect, disconnect
from genserve.placement.ray.fleet import find_fleet, run_fleet
from genserve.placement.ray.settings import RayConfig, ServingAddresses, Task

_STDOUT: Final = 1
_STDERR: Final = 2


async def main(task: Task, serving: ServingAddresses) -> int:
    """Connects and does the task, until it is asked to end. Returns the exit status."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    try:
        if not await _connected(task.ray, stopped):
            return 0
        loop.add_signal_handler(signal.SIGTERM, stopped.set)  # again: Ray has installed a handler that aborts
        if task.fleet is None:
            return await find_fleet(serving, stopped)
        return await run_fleet(task.ray, task.fleet, serving, stopped)
    except RayFailedError as error:
        say(str(error))
        return error.exit_status
    finally:
        if ray.is_initialized():
            await disconnect()


async def _connected(config: RayConfig, stopped: asyncio.Event) -> bool:
    """False if it was asked to end before."""
    connecting, waiting = asyncio.create_task(connect(config)), asyncio.create_task(stopped.wait())
    await asyncio.wait({connecting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not connecting.done():
        connecting.cancel()
        return False
    connecting.result()
    return True


def start() -> int:
    """Runs `main`. Returns the exit status."""
    task = Task.from_json(sys.argv[1])
    lines = os.fdopen(os.dup(_STDOUT), "wb")
    os.dup2(_STDERR, _STDOUT)  # Ray writes there what actors have said
    return asyncio.new_event_loop().run_until_complete(main(task, ServingAddresses(lines)))


if __name__ == "__main__":
    status = 1
    try:
        status = start()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # without Ray's hooks, and without waiting for a thread whose call to Ray does not return
