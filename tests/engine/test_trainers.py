"""Trainers that are not ours, on a real engine: FSDP's ranks, and TRL's calls. The examples of docs/trainers.md."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from genserve.client import AsyncClient
from genserve.errors import InvalidFieldError
from genserve.integrations.trl import VLLMClient
from tests.engine.examples import WRITTEN_ADDRESS, block
from tests.support import models
from tests.support.daemon_process import DaemonProcess
from tests.support.plain_vllm import PROMPTS
from tests.support.refusals import refuses
from tests.support.warm import process as warm

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "trainers.md"


def program(containing: str, address: str, checkpoint: Path) -> str:
    """An example of the guide, in which `model` is the checkpoint as transformers loads it."""
    return (
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(checkpoint)!r}, dtype='bfloat16')\n"
    ) + block("python", containing, GUIDE).replace(WRITTEN_ADDRESS, address)


async def served(client: AsyncClient, checkpoint: Path) -> bool:
    """Whether exactly the tensors of a checkpoint are served."""
    tensors = (await client.pull_weights()).state_dict()
    expected = models.load_tensors(checkpoint)
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.long("genserve/client/weights", "docs/trainers.md")  # tests/rpc/test_ranks.py has ranks without torchrun
async def test_ranks_of_fsdp_push_together(
    client: AsyncClient, daemon: DaemonProcess, checkpoints: dict[str, Path], restored: None, tmp_path: Path
) -> None:
    """As the guide has it: each its rows of a model of transformers, with a tied head."""
    before = (await client.get_weights()).weight_version
    script = tmp_path / "train.py"
    script.write_text(program("fully_shard", daemon.address, checkpoints["b"]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = await asyncio.to_thread(
        subprocess.run, torchrun, env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = re.findall(r"rank (\d+): version (\d+) is served", done.stdout)
    expected = [(rank, before + step) for rank in (0, 1) for step in (1, 2)]
    assert sorted((int(rank), int(version)) for rank, version in told) == expected
    assert await served(client, checkpoints["b"])


async def test_the_example_with_the_calls_of_trl_runs(
    client: AsyncClient, daemon: DaemonProcess, checkpoints: dict[str, Path], restored: None
) -> None:
    """One push, whose tensors are the module's parameters."""
    before = (await client.get_weights()).weight_version
    example = program("update_named_param", daemon.address, checkpoints["b"])
    done = await asyncio.to_thread(warm.run, [sys.executable, "-c", example], timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (await client.get_weights()).weight_version == before + 1
    assert await served(client, checkpoints["b"])


@pytest.fixture
async def trl(daemon: DaemonProcess) -> AsyncIterator[VLLMClient]:
    """A client with TRL's methods."""
    made = await asyncio.to_thread(VLLMClient, daemon.address)
    yield made
    await asyncio.to_thread(made.close)


async def test_completions_have_the_shapes_of_trl(client: AsyncClient, trl: VLLMClient) -> None:
    """Prompt-major, with the sampled token among its alternatives, the most likely first; tokens and values are those
    that our own client gets."""
    answer: Any = await asyncio.to_thread(
        trl.generate, PROMPTS, n=2, max_tokens=5, logprobs=2, generation_kwargs={"seed": 3, "ignore_eos": True}
    )
    assert answer["prompt_ids"] == PROMPTS
    assert [len(ids) for ids in answer["completion_ids"]] == [5] * 6
    generations = await client.generate_many(PROMPTS, n=2, max_tokens=5, logprobs=2, seed=3, ignore_eos=True)
    sequences = [sequence for generation in generations for sequence in generation.sequences]
    assert answer["completion_ids"] == [sequence.token_ids for sequence in sequences]
    for sequence, rows, ids in zip(sequences, answer["logprobs"], answer["logprob_token_ids"], strict=True):
        assert sequence.logprobs is not None
        for position, (values, token_ids) in enumerate(zip(rows, ids, strict=True)):
            assert values == sorted(values, reverse=True)
            assert len(values) == len(set(token_ids)) in (2, 3)
            found = dict(zip(token_ids, values, strict=True))
            expected = dict(sequence.logprobs.alternatives(position))
            expected[sequence.token_ids[position]] = sequence.logprobs.sampled[position]
            assert found == pytest.approx(expected, abs=0.05)


async def test_logprobs_are_of_the_sampled_token_alone_or_left_out(trl: VLLMClient) -> None:
    """0, TRL's default, and None."""
    answer: Any = await asyncio.to_thread(trl.generate, ["Once upon"], max_tokens=4, temperature=0.0)
    (ids,), (values,) = answer["logprob_token_ids"], answer["logprobs"]
    assert [[token_id] for token_id in answer["completion_ids"][0]] == ids
    assert all(len(value) == 1 and value[0] <= 0 for value in values)
    answer = await asyncio.to_thread(trl.generate, ["Once upon"], max_tokens=4, logprobs=None)
    assert answer["logprobs"] is answer["logprob_token_ids"] is None


async def test_options_of_generation(trl: VLLMClient) -> None:
    """They win over the arguments, and go to vLLM where we have no name for them; unknown ones are refused."""
    kwargs = {"max_tokens": 3, "ignore_eos": True, "include_stop_str_in_output": True}
    unknown = kwargs | {"surprise": 1}
    answer = await asyncio.to_thread(trl.generate, [[5, 6, 7]], max_tokens=9, generation_kwargs=kwargs)
    assert len(answer["completion_ids"][0]) == 3
    with refuses(InvalidFieldError, field="engine_params.surprise"):
        await asyncio.to_thread(trl.generate, [[5, 6, 7]], generation_kwargs=unknown)
    answer = await asyncio.to_thread(
        trl.generate, [[5, 6, 7]], max_tokens=9, structured_outputs_regex="[ab]{3}", temperature=0.0
    )
    assert answer["completion_ids"][0]


async def test_chats_are_rendered_by_the_models_template(client: AsyncClient, trl: VLLMClient) -> None:
    """One that is given is refused by name: whoever may send requests shall not run templates."""
    chats = [[{"role": "user", "content": "hello"}], [{"role": "user", "content": "bye"}]]
    answer = await asyncio.to_thread(trl.chat, chats, max_tokens=2, n=2, tools=[{"type": "function"}])
    assert answer["prompt_ids"] == [await client.tokenize(chat) for chat in chats]
    assert len(answer["completion_ids"]) == 4
    with refuses(InvalidFieldError, says="--trust-request-chat-template"):
        await asyncio.to_thread(trl.chat, chats, max_tokens=2, chat_template="{{ messages[0].content }}!")


async def test_sequences_are_scored(client: AsyncClient, trl: VLLMClient) -> None:
    """As their completion was when it was sampled greedily: its tokens are among the most likely ones."""
    generation = await client.generate(PROMPTS[0], max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
    sequence = [*PROMPTS[0], *generation.token_ids]
    answer: Any = await asyncio.to_thread(
        trl.get_sequence_logprobs, [sequence, sequence], [len(PROMPTS[0]), 0], top_logprobs=3
    )
    assert answer["actual_token_ids"] == [[[i] for i in generation.token_ids], [[i] for i in sequence]]
    keys = ("actual_token_ids", "actual_logprobs", "logprob_token_ids", "logprobs")
    for (token_id,), (value,), ids, values in zip(*(answer[key][0] for key in keys), strict=True):
        assert (token_id, value) in zip(ids, values, strict=True)
    logprobs = generation.sequences[0].logprobs
    assert logprobs is not None
    assert [row[0] for row in answer["actual_logprobs"][0]] == pytest.approx(logprobs.sampled, abs=0.05)
    assert all(len(row) == 3 for rows in answer["logprobs"] for row in rows)
    assert answer["logprobs"][1][0] == [float("-inf")] * 3
