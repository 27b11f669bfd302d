"""Who a cancellation is meant for, the running task or only what it waits for; and tasks that are to end."""

import asyncio
from collections.abc import Sequence
from typing import Any


def is_cancelled() -> bool:
    """Whether the running task was asked to end.

    A function that raises must not keep the task in a variable: the task has the error, whose traceback has the frame,
    which would have the task. Such a cycle keeps calls, and with them connections, until garbage is collected.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel_all(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Asks tasks to end, and returns when they have, however."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
