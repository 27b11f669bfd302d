"""How warm processes of an engine wait for each other's messages: with less of a CPU than vLLM spends."""

import time

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

_SPIN_S = 0.002
_NAP_S = 0.001
_spin_or_wait = SpinCondition.wait


def wait_lightly() -> None:
    """Lets readers of vLLM's queues nap between two looks at a queue, once they have waited for longer than a message
    takes that comes at once. vLLM's spin for a whole second after each message, at the cost of all other processes of a
    machine that has two cores and runs two engines. When they fall asleep, and what wakes them, is vLLM's."""
    SpinCondition.wait = _wait  # type: ignore[method-assign]


def _wait(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    if _SPIN_S < time.monotonic() - condition.last_read <= condition.busy_loop_s:
        time.sleep(_NAP_S)
    else:
        _spin_or_wait(condition, timeout_ms)
