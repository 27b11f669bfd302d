"""How late the event loop is: whatever blocks it delays every stream of tokens."""

import asyncio

from prometheus_client import CollectorRegistry, Histogram

_INTERVAL_S = 0.25
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopLag:
    """Measures it several times a second. `process` names what runs on the loop: daemon, frontend or router."""

    def __init__(self, registry: CollectorRegistry, process: str) -> None:
        self._seconds = Histogram(
            "genserve_event_loop_lag_seconds",
            "How much later than asked for the event loop called something.",
            ["process"],
            registry=registry,
            buckets=_BOUNDS_S,
        ).labels(process)

    async def run(self) -> None:
        """Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self._seconds.observe(max(0.0, loop.time() - due_s))
