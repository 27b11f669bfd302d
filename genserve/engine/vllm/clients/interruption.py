"""The cost of a pause for the sequences that it interrupts: tokens that they have computed, and the time without
output.

Each client of the engine watches its own sequences. The daemon puts together what all of them tell.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from genserve.engine.types import WAIT_PATIENCE_S
from genserve.engine.vllm.liveness import Liveness

_ANSWER_PATIENCE_S = 30.0


class OtherClients(Protocol):
    """Front ends, or the OpenAI server. Each wait has a deadline: a process that does not answer is ended, and its
    requests with it."""

    @property
    def num_requests(self) -> int:
        """Requests that are admitted and unfinished; where only sequences are known, these."""

    async def abort(self, request_ids: Sequence[str] | None) -> list[str]:
        """Ends requests (None = all) with reason ABORTED; the ids that ran."""

    async def pausing(self) -> int:
        """Requests that the engine aborts from now on end as PAUSED. How many there are."""

    async def paused(self) -> None:
        """The engine has aborted them."""

    def interrupted(self) -> "asyncio.Future[int]":
        """Nothing is scheduled: each watches its sequences from now on. Tokens that these have computed."""

    async def longest_wait_s(self) -> float | None:
        """When each of the watched sequences has another output or has ended, at the latest after WAIT_PATIENCE_S: the
        longest time that one was without output, None if none was."""

    async def wait_idle(self) -> None:
        """Returns when no request is left."""


class Heard(NamedTuple):
    """The progress of one unfinished sequence: when its last output came, on the monotonic clock, 0.0 before the first
    one, and its tokens, those of the prompt too."""

    last_output_s: float
    num_tokens: int


def of_vllm(state: Any) -> Heard:
    """internal: of vLLM's state of it."""
    last_output_s = 0.0 if state.is_prefilling else state.stats.last_token_ts
    num_output_tokens = 0 if state.detokenizer is None else state.detokenizer.num_output_tokens()  # of pooling none
    return Heard(last_output_s, state.prompt_len + num_output_tokens)


class Watch:
    """Sequences that have had output when nothing is scheduled, until each has another one or has ended.

    `states`: of unfinished sequences, by their ids; `heard` tells what is known of each.
    """

    def __init__(
        self, states: Mapping[str, Any], heard: Callable[[Any], Heard], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._states = states
        self._heard = heard
        self._clock = clock
        self._began_s = clock()
        self._longest_s: float | None = None
        self._over = asyncio.Event()
        # Ids, so that nothing keeps a stream alive.
        each = {i: heard(state) for i, state in states.items()}
        self.waiting = {i: known.last_output_s for i, known in each.items() if known.last_output_s}
        """Those that wait, by id: when each had its last output. When none does any more, the watch is over."""
        # The last token is the next one to be computed.
        self.num_computed_tokens: int = sum(each[i].num_tokens - 1 for i in self.waiting)
        """Tokens that they have keys and values of."""
        if not self.waiting:
            self._over.set()

    def step(self, gaps_s: Iterable[float]) -> None:
        """Outputs came; `gaps_s` are the seconds that their sequences were without one."""
        longest_s = max(gaps_s, default=0.0)  # those of first outputs have no gap
        if longest_s > (self._longest_s or 0.0):
            self._longest_s = longest_s
        self._look()

    def end(self) -> None:
        """Those that still wait count with their wait until now."""
        self._look()
        if self.waiting:
            self._longest_s = max(self._longest_s or 0.0, self._clock() - self._began_s)
            self.waiting.clear()
            self._over.set()

    async def longest_wait_s(self, patience_s: float = WAIT_PATIENCE_S) -> float | None:
        """The longest time that one was without output, when all have output or have ended; None if none was seen."""
        try:
            async with asyncio.timeout(patience_s):
                await self._over.wait()
        except TimeoutError:
            self.end()
        return self._longest_s

    def _look(self) -> None:
        unfinished = ((i, at, self._states.get(i)) for i, at in self.waiting.items())
        self.waiting = {i: at for i, at, state in unfinished if state is not None and self._heard(state)[0] == at}
        if not self.waiting:
            self._over.set()


class Interruptions:
    """The latest one of a client. vLLM's stat loggers call it for each step."""

    def __init__(self) -> None:
        self._latest: Watch | None = None

    def begin(self, watch: Watch) -> Watch:
        """Ends the one before."""
        if self._latest is not None:
            self._latest.end()
        self._latest = watch
        return watch

    def step(self, iteration_stats: Any) -> None:
        """vLLM's statistics of outputs that came."""
        if self._latest is not None and self._latest.waiting:
            self._latest.step(iteration_stats.inter_token_latencies_iter)

    async def longest_wait_s(self) -> float | None:
        """Of the latest one, when it is over."""
        return None if self._latest is None else await self._latest.longest_wait_s()


class EngineInterruption:
    """`own`: of the daemon's sequences. Asks the other clients, now and for their waits."""

    def __init__(self, own: Watch, others: Sequence[OtherClients], liveness: Liveness) -> None:
        self._own = own
        self._others = others
        self._liveness = liveness
        self._telling = [each.interrupted() for each in others]

    @property
    def num_computed_tokens(self) -> int | None:
        """Tokens that the sequences of all clients have keys and values of; None until all have reported."""
        if not all(each.done() for each in self._telling):
            return None
        return self._own.num_computed_tokens + sum(each.result() for each in self._telling)

    async def told(self) -> None:
        """Returns when they have."""
        await asyncio.gather(*map(asyncio.shield, self._telling))  # who gives up waiting does not end it for others

    async def longest_wait_s(self) -> float | None:
        """The longest wait of a sequence of any client."""
        elsewhere = (each.longest_wait_s() for each in self._others)
        waits = await self._liveness.wait(
            asyncio.gather(self._own.longest_wait_s(), *elsewhere),
            what="wait of interrupted requests",
            timeout_s=WAIT_PATIENCE_S + _ANSWER_PATIENCE_S,
        )
        return max((each for each in waits if each is not None), default=None)
