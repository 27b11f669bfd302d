"""How the processes of an engine wait for each other's messages: with less of a CPU than vLLM spends.

vLLM's readers call sched_yield() for a whole second after each message. An engine that is asked something every second
so takes a core from all others, and worse: on a virtual machine with Linux 6.18 the kernel's own workers of that core
did not run either. Another engine that started, and asked them to let it move its memory, stood still for minutes.
"""

import time

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

_SPIN_S = 0.002
_NAP_S = 0.001
_spin_or_wait = SpinCondition.wait


def load() -> None:
    """Lets readers of vLLM's queues nap between two looks at a queue, once they have waited for longer than a message
    takes that comes at once. When they fall asleep, and what wakes them, is vLLM's."""
    SpinCondition.wait = _wait  # type: ignore[method-assign]


def _wait(condition: SpinCondition, timeout_ms: int | None = None) -> None:
    if _SPIN_S < time.monotonic() - condition.last_read <= condition.busy_loop_s:
        time.sleep(_NAP_S)
    else:
        _spin_or_wait(condition, timeout_ms)
