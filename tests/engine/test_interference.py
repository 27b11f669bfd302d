"""No request's answer depends on its neighbours: random requests, alone and beside absurd ones, against real vLLM.

GENSERVE_INTERFERENCE_CASES and GENSERVE_INTERFERENCE_SEED choose how many and which.
"""

import os
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from genserve.client import AsyncClient
from tests.support import models
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.interference import Case, Cases, alone, differences, together

NUM_CASES = int(os.environ.get("GENSERVE_INTERFERENCE_CASES", "500"))
SEED = int(os.environ.get("GENSERVE_INTERFERENCE_SEED", str(random.SystemRandom().randrange(1 << 31))))
BATCH = 20
NUM_BESIDE = 4


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """In float32: what is computed in another order differs by less than any likelihoods do."""
    directory = tmp_path_factory.mktemp("interference")
    flags = ["--model", str(models.tiny_qwen3(directory / "model")), *SMALL_ENGINE, "--dtype", "float32"]
    process = DaemonProcess(flags, directory / "stderr")
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client of it."""
    async with AsyncClient(daemon.address) as connected:
        yield connected


@pytest.mark.failure_is_final
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "num_cases",
    [
        2 * BATCH,
        pytest.param(
            NUM_CASES, marks=pytest.mark.long("genserve/engine/vllm/requests", "tests/support/interference.py")
        ),
    ],
)
async def test_no_answer_depends_on_other_requests(client: AsyncClient, num_cases: int) -> None:
    """Tokens, log-probabilities, alternatives and ends, also while the engine is paused and resumed."""
    cases, found, num_tokens = Cases(SEED), list[str](), 0
    for _ in range(0, num_cases, BATCH):
        batch = cases.batch(BATCH)
        expected = await alone(client, batch)
        answers = await together(client, batch, [cases.poison() for _ in range(NUM_BESIDE)])
        for case, one, other in zip(batch, expected, answers, strict=True):
            found += differences(case, one, other)
            num_tokens += sum(len(each.token_ids) for each in other.sequences)
    print(f"seed {SEED}: {num_cases} requests, {num_tokens} tokens")
    assert not found, f"seed {SEED}: {len(found)} differences, such as {found[:5]}"
    assert num_tokens > num_cases


async def test_a_difference_is_found(client: AsyncClient) -> None:
    """Of tokens, of likelihoods and of alternatives."""
    case = Case([5, 6, 7], {"max_tokens": 4, "ignore_eos": True, "temperature": 0.0, "logprobs": 2})
    others = [
        replace(case, options={**case.options, "logit_bias": {7: 100.0}}),
        replace(case, options={**case.options, "logprobs": 3}),
        replace(case, options={**case.options, "max_tokens": 3}),
    ]
    (expected,) = await alone(client, [case])
    assert differences(case, expected, expected) == []
    for answer in await alone(client, others):
        assert differences(case, expected, answer)
