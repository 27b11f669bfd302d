"""No request's answer depends on its neighbours: random requests, alone and beside absurd ones, against real vLLM. And
alone they are answered as plain vLLM and transformers would.

GENSERVE_INTERFERENCE_CASES and GENSERVE_INTERFERENCE_SEED choose how many and which.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from genserve.client import AsyncClient
from tests.support import models
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.interference import BATCH, TOLERANCE, Case, Cases, alone, differences, interferences, together
from tests.support.labelled_streams import LiveStreams, Recorded
from tests.support.plain_answers import plain_answers

NUM_STREAMS = 16
NUM_CASES = int(os.environ.get("GENSERVE_INTERFERENCE_CASES", "300"))
SEED = int(os.environ.get("GENSERVE_INTERFERENCE_SEED", str(random.SystemRandom().randrange(1 << 31))))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is served."""
    return models.tiny_qwen3(tmp_path_factory.mktemp("interference") / "model", dtype="float32")


@pytest.fixture(scope="module")
def daemon(checkpoint: Path) -> Iterator[DaemonProcess]:
    """In float32: what is computed in another order differs by less than any likelihoods do."""
    flags = ["--model", str(checkpoint), *SMALL_ENGINE, "--dtype", "float32"]
    process = DaemonProcess(flags, checkpoint.parent / "stderr")
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


@pytest.mark.failure_is_final
@pytest.mark.timeout(3600)
@pytest.mark.long("genserve/engine/vllm/requests", "tests/support/interference.py", "tests/support/plain_answers.py")
async def test_answers_are_those_of_plain_vllm(client: AsyncClient, checkpoint: Path) -> None:
    """Of an AsyncLLM without genserve, given the same parameters."""
    cases = Cases(SEED).batch(NUM_CASES // 3)  # each is computed twice, one at a time
    asked = [{"prompt": case.prompt, "options": of_vllm(case)} for case in cases]
    expected = await asyncio.to_thread(plain_answers, checkpoint, asked, checkpoint.parent / "cases.json")
    found: list[str] = []
    for begin in range(0, len(cases), BATCH):
        here = slice(begin, begin + BATCH)
        answers = await together(client, cases[here], [])
        for case, one, other in zip(cases[here], expected[here], answers, strict=True):
            found += differences(case, one, other)
    assert not found, f"seed {SEED}: {len(found)} differences, such as {found[:5]}"


def of_vllm(case: Case) -> dict[str, Any]:
    """Its options as vLLM's SamplingParams take them."""
    options = {name: value for name, value in case.options.items() if name not in ("text", "engine_params")}
    return {**options, **case.options.get("engine_params", {})}


@pytest.mark.failure_is_final
@pytest.mark.long("genserve/engine/vllm", "genserve/worker", "tests/support/labelled_streams.py")
async def test_labels_name_the_weights_with_which_transformers_says_the_same(
    client: AsyncClient, checkpoint: Path
) -> None:
    """A greedy token is the likeliest one of the version that it is labelled with, all before it given: a push makes
    keys and values anew."""
    other = models.perturbed(checkpoint, checkpoint.parent / "other", seed=1)
    served = (await client.get_weights()).weight_version
    pushed = {served: checkpoint, served + 1: other, served + 2: checkpoint}
    async with LiveStreams.running(client, NUM_STREAMS) as live:
        for version in (served + 1, served + 2):
            await live.gained(30)
            await client.push_weights(pushed[version], version=version, timeout_s=60.0)
        await live.gained(30)
        streams = await live.end()
    behind = {path: [behind_likeliest(path, each) for each in streams] for path in (checkpoint, other)}
    for number, stream in enumerate(streams):
        assert set(stream.labels) == set(pushed), "it did not live across both pushes"
        labelled = [behind[pushed[label]][number][place] for place, label in enumerate(stream.labels)]
        assert max(labelled) < TOLERANCE, f"{stream.request_id}: token {labelled.index(max(labelled))}"
    foreign = [
        behind[other if pushed[label] == checkpoint else checkpoint][number][place]
        for number, stream in enumerate(streams)
        for place, label in enumerate(stream.labels)
    ]
    assert sum(each > TOLERANCE for each in foreign) > 0.5 * len(foreign), "the other labels would do as well"


def behind_likeliest(path: Path, stream: Recorded) -> list[float]:
    """For each token of a stream, by how much (log-probability) a model of transformers has a likelier one."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.tensor([[*stream.prompt, *stream.sequence.token_ids]])
    with torch.inference_mode():
        logits = model(tokens).logits[0, len(stream.prompt) - 1 : -1].log_softmax(-1)
    chosen = logits.gather(1, tokens[0, len(stream.prompt) :, None])[:, 0]
    return list(map(float, logits.max(-1).values - chosen))


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
