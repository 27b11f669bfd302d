"""The engine as a front end has it: it admits requests and streams their tokens. All else is the daemon's."""

from collections.abc import Callable, Sequence

from vllm.utils.system_utils import set_process_title
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from genserve.engine.generation import ChatPrompt, TextPrompt
from genserve.engine.vllm.clients.interruption import Watch, of_vllm
from genserve.engine.vllm.clients.join import Joined, join_at_seat
from genserve.engine.vllm.liveness import Liveness
from genserve.engine.vllm.requests.intake import Adapters, Intake
from genserve.engine.vllm.requests.outputs import StreamingLLM
from genserve.worker.contract.lifetime import end_with_process

NAME = "frontend"
"""In lists of processes, behind "genserve::"."""


def begin(daemon_pid: int) -> None:
    """Call first. Ends this process with the daemon, however the daemon ends, as the engine's workers end; and gives it
    a name of its own."""
    set_process_title(NAME, prefix="genserve")
    end_with_process(daemon_pid)


class FrontendEngine:
    """A client of the daemon's engine. Made by `join`."""

    def __init__(self, joined: Joined, adapters: Adapters, weight_version: Callable[[], int]) -> None:
        self._llm = llm = joined.llm
        self._interruptions = joined.row.interruptions
        # internal: ends the streams as vLLM does when its engine has died.
        self._liveness = Liveness(lambda: llm.output_processor.propagate_error(VllmEngineDeadError()))
        invitation = joined.invitation
        self._intake = Intake(
            llm, self._liveness, invitation.info, invitation.limits, adapters, joined.tally, weight_version
        )
        self.submit, self.wait_idle = self._intake.submit, self._intake.wait_idle
        self.pausing, self.paused = self._intake.pausing, self._intake.paused
        self.info = invitation.info
        """The model, and the limits of requests."""
        assert llm.output_handler is not None  # internal: the task that ends when EngineCore dies
        llm.output_handler.add_done_callback(lambda _: self.declare_dead("EngineCore reported an error"))

    @classmethod
    async def join(
        cls, data: bytes, fds: Sequence[int], adapters: Adapters, weight_version: Callable[[], int]
    ) -> "FrontendEngine":
        """Joins the engine that an invitation is for, with the descriptors of the seat. Raises UnavailableError."""
        return cls(await join_at_seat(data, fds, StreamingLLM), adapters, weight_version)

    @property
    def is_traced(self) -> bool:
        """Whether vLLM exports spans."""
        return self._intake.is_traced

    async def abort(self, request_ids: Sequence[str] | None) -> tuple[list[str], list[str]]:
        """Ends requests of this front end."""
        return self._intake.abort(request_ids)

    async def tokenize(self, prompt: TextPrompt | ChatPrompt, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt."""
        return await self._intake.prompts.encode(prompt, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return await self._intake.prompts.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def interrupted(self) -> int:
        """Nothing is scheduled: watches the sequences from now on. Tokens that these have computed."""
        # internal: vLLM's states of unfinished sequences.
        watch = self._interruptions.begin(Watch(self._llm.output_processor.request_states, of_vllm))
        return watch.num_computed_tokens

    async def longest_wait_s(self) -> float | None:
        """The longest time that one of them was without output, when all have output again or have ended; None if none
        was."""
        return await self._interruptions.longest_wait_s()

    def declare_dead(self, cause: str) -> None:
        """Ends every stream: the engine has died."""
        self._liveness.declare_dead(cause)

    def close(self) -> None:
        """Leaves the engine."""
        self._intake.close()
        self._llm.shutdown(0.0)
