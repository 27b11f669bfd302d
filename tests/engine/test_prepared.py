"""Pushes that are prepared beside the live weights of real vLLM, and wait for their commit."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from genserve.client import AsyncClient, Generation
from genserve.weights.push.outcomes import STEPS
from tests.engine.outputs import greedy_outputs, next_version, outputs_of, state_of
from tests.support import models
from tests.support.plain_vllm import Reference


def digest_of(checkpoint: Path) -> str:
    """Of its contents, as PushHeader.content_digest defines it."""
    sha256 = hashlib.sha256()
    for name, tensor in sorted(models.load_tensors(checkpoint).items()):
        digest = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        sha256.update(f"{name}\tBF16\t{','.join(map(str, tensor.shape))}\t{digest}\n".encode())
    return sha256.hexdigest()


async def test_generation_keeps_the_old_version_until_the_commit(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path], reference: Callable[..., Reference]
) -> None:
    """A stream that runs all the while has one span of each; outputs and digests are those of cold starts."""
    a, b, version = reference("a"), reference("b"), await next_version(client)
    generation = Generation()
    options: Any = {"temperature": 0.0, "max_tokens": 2040, "ignore_eos": True, "request_id": "all the while"}
    stream, is_aborted = client.stream([3, 1, 4], **options), False
    generation.add(await anext(stream))
    prepared = await client.push_weights(checkpoints["b"], version=version, action="prepare")
    assert (prepared.push.state, prepared.applied) == ("prepared", None)
    assert prepared.push.content_digest == digest_of(checkpoints["b"])
    assert prepared.state.weight_version == version - 1
    outputs, digests = await state_of(client)
    assert (outputs, digests) == (outputs_of(a), a["digests"])
    committed = await client.commit_push(prepared.push.push_id)
    assert committed.push.state == "applied"
    assert committed.applied is not None and committed.applied.active_version == version
    assert tuple(committed.applied.step_s) == STEPS
    async for delta in stream:
        generation.add(delta)
        if not is_aborted and generation.sequences[0].weight_spans[-1].version == version:
            is_aborted = True
            await client.abort(["all the while"])
    spans = generation.sequences[0].weight_spans
    assert [span.version for span in spans] == [version - 1, version]
    outputs, digests = await state_of(client)
    assert (outputs, digests) == (outputs_of(b), b["digests"])
    served = await client.get_weights()
    assert (served.push_id, served.content_digest) == (prepared.push.push_id, prepared.push.content_digest)


async def test_a_prepared_push_that_another_one_overtakes_is_prepared_anew(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path], reference: Callable[..., Reference]
) -> None:
    """Its bytes are still there."""
    version = await next_version(client)
    prepared = await client.push_weights(checkpoints["b"], version=version + 1, action="prepare")
    await client.push_weights(checkpoints["a"], version=version)
    assert (await client.get_push(prepared.push.push_id)).push.state == "staged"
    assert await greedy_outputs(client) == outputs_of(reference("a"))
    await client.commit_push(prepared.push.push_id)
    assert await greedy_outputs(client) == outputs_of(reference("b"))


async def test_a_part_that_another_push_overtakes_is_completed_from_that_one(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path], reference: Callable[..., Reference]
) -> None:
    """What it does not bring has the values that are served when it is committed."""
    version, b = await next_version(client), models.load_tensors(checkpoints["b"])
    norms = {name: tensor for name, tensor in b.items() if "norm" in name}
    part = await client.push_weights(norms, version=version + 1, partial=True, action="prepare")
    assert part.push.state == "prepared"
    rest = {name: tensor for name, tensor in b.items() if name not in norms}
    await client.push_weights(rest, version=version, partial=True)
    await client.commit_push(part.push.push_id)
    assert await greedy_outputs(client) == outputs_of(reference("b"))
