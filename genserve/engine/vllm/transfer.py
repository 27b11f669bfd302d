"""vLLM's own weight transfer over the live weights of all ranks."""

import time

from genserve.engine.vllm.weights import GRACE_S, LiveWeights
from genserve.engine.vllm.workers import WorkerError
from genserve.errors import DeadlineError, GenserveError
from genserve.worker.contract.calls import Transfer


class LiveTransfer:
    """vLLM's own transfer over the live weights of all ranks, as `WeightTransfer` specifies.

    It uses genserve's worker extension and not AsyncLLM's methods of these names: a rank that raises there leaves late
    replies for the next call, and errors of other data-parallel engines are lost.
    """

    def __init__(self, weights: LiveWeights) -> None:
        self._weights = weights

    async def init(self, info: str, timeout_s: float) -> None:
        """Connects every rank to the trainer."""
        await self._call("init", timeout_s, info)

    async def start(self, timeout_s: float) -> None:
        """Gets every rank ready to receive."""
        await self._call("start", timeout_s)

    async def update(self, info: str, timeout_s: float) -> None:
        """Has every rank receive tensors."""
        await self._call("update", timeout_s, info)

    async def finish(self, version: int, timeout_s: float) -> None:
        """Makes what was received live, and labels later tokens."""
        await self._call("finish", timeout_s)
        await self._weights.label(str(version), timeout_s)
        self._weights.version = version

    async def abandon(self, timeout_s: float) -> None:
        """Ends an update that was not finished."""
        await self._call("abandon", timeout_s)

    async def _call(self, call: str, timeout_s: float, info: str = "") -> None:
        deadline_s = time.monotonic() + timeout_s
        try:
            await self._weights.step("genserve_transfer", Transfer(call, info).to_wire(), timeout_s + GRACE_S)
        except DeadlineError as error:
            raise self._weights.given_up(error) from error
        except WorkerError as error:
            raise GenserveError(f"vLLM's {call} failed: {error}") from error
        if time.monotonic() > deadline_s:
            raise DeadlineError(f"vLLM's {call} took longer than {timeout_s:g} s")
