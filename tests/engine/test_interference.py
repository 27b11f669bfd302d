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
from tests.support.interference import BATCH, Case, Cases, alone, differences, interferences

NUM_CASES = int(os.environ.get("GENSERVE_INTERFERENCE_CASES", "300"))
SEED = int(os.environ.get("GENSERVE_INTERFERENCE_SEED", str(random.SystemRandom().randrange(1 << 31))))


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
    found = await interferences(client, Cases(SEED), num_cases)
    assert not found, f"seed {SEED}: {len(found)} differences, such as {found[:5]}"


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
