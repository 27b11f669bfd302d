"""An engine that computes nothing: what is left of a token's cost is its way through the server.

`--distributed-executor-backend bench.mock_engine.MockExecutor`: vLLM takes the path of a class there. The engine's
process, its scheduler and its messages to clients are vLLM's own, and there is a worker with a model that is never run.

Each step gives one token to each of its requests, the same ones whoever asks. It takes as many milliseconds as the
first token of a prompt says, the slowest of the step's: a prompt is the one thing that every server passes on as it is.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

_NUM_TOKEN_IDS = 400
"""Less than the smallest vocabulary of the benchmarks' models."""
_LOGPROB = -1.0


@dataclass(slots=True)
class _Request:
    pace_s: float
    last_token_id: int
    num_logprobs: int | None

    def next_token(self) -> int:
        self.last_token_id = self.last_token_id % _NUM_TOKEN_IDS + 1
        return self.last_token_id


class MockExecutor(UniProcExecutor):  # type: ignore[misc]
    """Answers instead of the worker. In the engine's process, which has nothing to wait for but the pace."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._requests: dict[str, _Request] = {}

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        """One step. Prompts are never cut into pieces (see engines.flags), so that every request gets a token."""
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            prompt, sampling = new.prompt_token_ids or [0], new.sampling_params
            num_logprobs = None if sampling is None else sampling.logprobs
            self._requests[new.req_id] = _Request(prompt[0] / 1000, prompt[-1], num_logprobs)
        output = self._step(list(scheduler_output.num_scheduled_tokens))
        if not non_block:
            return output
        done = Future[ModelRunnerOutput]()
        done.set_result(output)
        return done

    def _step(self, request_ids: list[str]) -> ModelRunnerOutput:
        if not request_ids:
            return EMPTY_MODEL_RUNNER_OUTPUT
        requests = [self._requests[each] for each in request_ids]
        if pace_s := max(each.pace_s for each in requests):
            time.sleep(pace_s)
        token_ids = [[each.next_token()] for each in requests]
        wanted = [each.num_logprobs for each in requests if each.num_logprobs is not None]
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=token_ids,
            logprobs=_logprobs(token_ids, 1 + max(wanted)) if wanted else None,
        )


def _logprobs(token_ids: list[list[int]], width: int) -> LogprobsLists:
    """Of the sampled tokens, repeated where those of more are asked for."""
    sampled = np.array(token_ids, dtype=np.int32)
    logprobs = np.full((len(token_ids), width), _LOGPROB, dtype=np.float32)
    return LogprobsLists(np.repeat(sampled, width, axis=1), logprobs, np.ones(len(token_ids), dtype=np.int32))
