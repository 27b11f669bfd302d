"""Weight pushes through gRPC against real vLLM."""

import asyncio
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from genserve.client import AsyncClient, GeneratedSequence, Generation
from genserve.errors import (
    ApplyInProgressError,
    ChecksumMismatchError,
    ChunkOutOfRangeError,
    GenserveError,
    ManifestMismatchError,
    PushTruncatedError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from genserve.v1 import weights_pb2, weights_pb2_grpc
from genserve.weights.push.outcomes import STEPS
from tests.engine.outputs import greedy_outputs, next_version, outputs_of
from tests.support import models, on_runner_v2
from tests.support.daemon_process import DaemonProcess
from tests.support.patience import until
from tests.support.plain_vllm import PROMPTS, Reference
from tests.support.raw_push import RawPush, replaced

NOTHING = sha256().hexdigest()


async def test_a_pushed_checkpoint_equals_a_cold_start_on_it(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path], reference: Callable[..., Reference]
) -> None:
    """Outputs, and the digest of every live tensor, are those of an engine that loaded the checkpoint itself."""
    a, b = reference("a"), reference("b")
    assert await greedy_outputs(client) == outputs_of(a) != outputs_of(b)
    pushed = await client.push_weights(checkpoints["b"], version=await next_version(client))
    assert await greedy_outputs(client) == outputs_of(b)
    served = await client.get_weights(include_digests=True)
    assert {f"{rank} {name}": value for (rank, name), value in served.digests.items()} == b["digests"] != a["digests"]
    # vLLM's own checksums cover what is still a parameter; a packed linear's is that of an empty tensor, left out here.
    theirs = {name: value for name, value in b["checksums"].items() if value != NOTHING}
    assert theirs.items() <= {f"{r}:{name}": value for (r, name), value in served.digests.items()}.items()
    assert pushed.applied is not None
    assert served.weight_version == pushed.applied.active_version == pushed.applied.previous_version + 1
    assert tuple(pushed.applied.step_s) == STEPS


async def test_tensors_of_a_state_dict_can_be_pushed_and_are_cast(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path], reference: Callable[..., Reference]
) -> None:
    """A trainer that keeps its weights in float32 pushes them as they are."""
    tensors = {name: tensor.float() for name, tensor in models.load_tensors(checkpoints["b"]).items()}
    await client.push_weights(tensors, version=await next_version(client))
    assert await greedy_outputs(client) == outputs_of(reference("b"))


async def test_spans_are_exact_across_pushes_into_16_live_streams(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path]
) -> None:
    """Every token has the label of the weights it was sampled under.

    The streams are greedy, and a push recomputes their keys and values, so a token is the likeliest one under its own
    version given all before it, and a token under the other version mostly is not: that is the control.
    """
    first = await next_version(client)
    names = {first - 1: "a", first: "b", first + 1: "a", first + 2: "b"}
    deltas: list[GeneratedSequence] = []
    nums_tokens, num_tokens = [0] * 16, on_runner_v2.fewer(1500)

    async def one(i: int) -> tuple[list[int], Generation]:
        prompt, generation = [i + 1, 2 * i + 5, 77], Generation()
        live = GeneratedSequence(0)
        async for delta in client.stream(prompt, temperature=0.0, max_tokens=num_tokens, ignore_eos=True):
            generation.add(delta)
            nums_tokens[i] = len(generation.token_ids)
            for output in delta.outputs:
                live.add(output)
                covered = [(span.start, span.end) for span in output.weight_spans]
                assert sum(end - start for start, end in covered) == len(output.token_ids)
        deltas.append(live)
        return prompt, generation

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i)) for i in range(16)]
        for version in (first, first + 1, first + 2):
            await gained(nums_tokens, 40)
            await client.push_weights(checkpoints[names[version]], version=version)
    done = [task.result() for task in tasks]
    versions = {span.version for _, generation in done for span in generation.sequences[0].weight_spans}
    assert versions == set(names), "the streams did not live across all three pushes"

    by_name: dict[str, list[tuple[float, bool]]] = {"a": [], "b": []}
    for name in ("b", "a"):  # b is served now
        if name == "a":
            await client.push_weights(checkpoints["a"], version=first + 3)
        for prompt, generation in done:
            tokens = generation.sequences[0].token_ids
            scored = await client.generate([*prompt, *tokens], prompt_logprobs=1, max_tokens=1, cache_salt=name)
            assert scored.prompt is not None and scored.prompt.logprobs is not None
            logprobs = scored.prompt.logprobs
            spans = generation.sequences[0].weight_spans
            assert [s.start for s in spans] == [0, *[s.end for s in spans][:-1]]
            assert spans[-1].end == len(tokens) == num_tokens
            for span in spans:
                for position in range(span.start, span.end):
                    row = len(prompt) - 1 + position
                    behind = logprobs.values[row] - logprobs.sampled[row]
                    by_name[name].append((behind, names[span.version] == name))
    for scores in by_name.values():
        own = [behind for behind, is_own in scores if is_own]
        foreign = [behind for behind, is_own in scores if not is_own]
        assert max(own) < 0.15, "a token is not the likeliest one of the version it is labelled with"
        assert sum(behind > 0.15 for behind in foreign) > 0.5 * len(foreign), "the control cannot tell versions apart"


async def gained(nums_tokens: list[int], num_tokens: int) -> None:
    """Waits until each stream has so many tokens more."""
    wanted = [number + num_tokens for number in nums_tokens]
    await until(lambda: all(number >= least for number, least in zip(nums_tokens, wanted, strict=True)))


async def test_seeded_streams_survive_a_push_that_recomputes_them_all_at_once(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path]
) -> None:
    """Their keys and values do not fit one step of the engine, and vLLM dies of a seeded prefill in pieces."""
    nums_tokens, num_tokens = [0] * 16, on_runner_v2.fewer(900)

    async def one(i: int) -> None:
        async for delta in client.stream([i + 1, 9], temperature=1.0, seed=i, max_tokens=num_tokens, ignore_eos=True):
            nums_tokens[i] += sum(len(output.token_ids) for output in delta.outputs)

    streams = [asyncio.create_task(one(i)) for i in range(16)]
    await gained(nums_tokens, num_tokens // 6)
    pushed = await client.push_weights(checkpoints["b"], version=await next_version(client))
    assert pushed.applied is not None
    assert pushed.applied.requests_kept == 16
    await asyncio.gather(*streams)
    assert nums_tokens == [num_tokens] * 16


async def test_a_push_under_a_lease_leaves_the_engine_paused(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path]
) -> None:
    """The trainer that paused decides when generation goes on."""
    async with client.paused() as lease:
        result = await client.push_weights(
            checkpoints["b"], version=await next_version(client), pause_lease_id=lease.lease_id
        )
        assert result.applied is not None and result.applied.paused_s == 0
        assert (await client.status()).state.phase.lower() == "paused"
    assert (await client.status()).state.phase.lower() == "running"


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model__layers__7__mlp__what": torch.zeros(2)}, "model.layers.7.mlp.what"),
        ({"model__norm__weight": None}, "model.norm.weight"),
        ({"model__norm__weight": torch.zeros(64, dtype=torch.bfloat16)}, "model.norm.weight"),
        ({"model__norm__weight": torch.zeros(128, dtype=torch.int32)}, "model.norm.weight"),
    ],
    ids=["unknown", "missing", "wrong shape", "wrong dtype"],
)
async def test_a_manifest_that_does_not_fit_names_the_tensor_and_changes_nothing(
    client: AsyncClient, checkpoints: dict[str, Path], change: dict[str, Any], name: str
) -> None:
    """MANIFEST_MISMATCH before a byte moves; the same generation and a whole push work after it."""
    before = await greedy_outputs(client)
    version = await next_version(client)
    with pytest.raises(ManifestMismatchError) as raised:
        await client.push_weights(replaced(models.load_tensors(checkpoints["b"]), **change), version=version)
    assert any(name in v.field + v.description for v in raised.value.violations), raised.value.violations
    assert await greedy_outputs(client) == before
    assert await next_version(client) == version


async def test_a_version_must_be_newer_and_the_expected_one_must_be_served(
    client: AsyncClient, checkpoints: dict[str, Path]
) -> None:
    """Both are FAILED_PRECONDITION and change nothing."""
    served = (await client.get_weights()).weight_version
    with pytest.raises(VersionNotNewerError):
        await client.push_weights(checkpoints["b"], version=served)
    with pytest.raises(WeightVersionMismatchError):
        await client.push_weights(checkpoints["b"], version=served + 1, expected_version=served + 7)
    assert (await client.get_weights()).weight_version == served


@pytest.fixture
async def raw_push(
    client: AsyncClient, daemon: DaemonProcess, checkpoints: dict[str, Path], request: pytest.FixtureRequest
) -> RawPush:
    """A push of checkpoint b, named after the test."""
    return RawPush(daemon.address, checkpoints["b"], await next_version(client), request.node.name)


async def test_a_flipped_bit_is_found_and_nothing_is_applied(
    client: AsyncClient, raw_push: RawPush, restored: None, reference: Callable[..., Reference]
) -> None:
    """DATA_LOSS; the same bytes sent right afterwards are applied under the same push id."""
    with pytest.raises(ChecksumMismatchError):
        await raw_push.send(raw_push.frames((0, len(raw_push.data)), crc32c=12345))
    assert await greedy_outputs(client) == outputs_of(reference("a"))
    await raw_push.send(raw_push.frames((0, len(raw_push.data))))
    assert await greedy_outputs(client) == outputs_of(reference("b"))


@pytest.mark.parametrize("end", [False, True], ids=["cut off", "ended too early"])
async def test_a_truncated_push_changes_nothing_and_can_be_resumed(
    client: AsyncClient, raw_push: RawPush, restored: None, reference: Callable[..., Reference], end: bool
) -> None:
    """PUSH_TRUNCATED; GetPush says what is missing, and just that completes the push, in the same attempt."""
    raw_push.header.attempt = "a"
    with pytest.raises(PushTruncatedError):
        await raw_push.send(raw_push.frames((0, 1000), (5000, 6000)), end=end)
    assert await greedy_outputs(client) == outputs_of(reference("a"))
    push = await client.get_push(raw_push.header.push_id)
    assert [tuple(r) for r in push.push.missing] == [(1000, 5000), (6000, len(raw_push.data))]
    response = await raw_push.send(raw_push.frames((1000, 5000), (6000, len(raw_push.data))))
    assert response.applied.active_version == raw_push.header.weight_version
    assert await greedy_outputs(client) == outputs_of(reference("b"))


async def test_a_push_that_trickles_in_is_not_seen_before_its_end(
    client: AsyncClient, raw_push: RawPush, restored: None, reference: Callable[..., Reference]
) -> None:
    """Workers prepare it meanwhile, from the tensors that are there; in an order of bytes that makes them wait."""
    size = len(raw_push.data)
    cuts = [size * part // 12 for part in range(13)]
    chunks = list(pairwise(cuts))
    chunks = [*chunks[1:4], chunks[0], *chunks[5:], chunks[4]]
    sending = asyncio.create_task(raw_push.send(raw_push.frames(*chunks), pace_s=0.2))
    while not sending.done():
        state = (await client.status()).state
        if state.weight_version < raw_push.header.weight_version:
            before = await greedy_outputs(client)
            if (await client.status()).state.weight_version < raw_push.header.weight_version:
                assert before == outputs_of(reference("a"))
    await sending
    assert await greedy_outputs(client) == outputs_of(reference("b"))
    served = await client.get_weights(include_digests=True)
    assert {f"{rank} {name}": value for (rank, name), value in served.digests.items()} == reference("b")["digests"]


async def test_a_chunk_outside_the_byte_space_is_refused(client: AsyncClient, raw_push: RawPush) -> None:
    """INVALID_ARGUMENT / CHUNK_OUT_OF_RANGE, and the daemon goes on."""
    frames = raw_push.frames((0, 10))
    frames[1].chunk.offset = len(raw_push.data) - 5
    with pytest.raises(ChunkOutOfRangeError):
        await raw_push.send(frames)
    assert (await client.generate(PROMPTS[0], max_tokens=1)).token_ids


async def test_a_chunk_before_the_header_is_refused(client: AsyncClient, raw_push: RawPush) -> None:
    """The header opens a push."""
    with pytest.raises(GenserveError) as raised:
        await raw_push.send(raw_push.frames((0, 10))[1:])
    assert raised.value.reason == "INVALID_FIELD"


async def test_second_push_is_refused_at_once_and_names_the_first(
    client: AsyncClient, daemon: DaemonProcess, raw_push: RawPush, checkpoints: dict[str, Path]
) -> None:
    """ABORTED / APPLY_IN_PROGRESS names the push that holds the place; when its stream is gone the place is free."""
    release = asyncio.Event()

    async def requests() -> AsyncIterator[weights_pb2.PushWeightsRequest]:
        for frame in raw_push.frames((0, 1000)):
            yield frame
        await release.wait()

    async with grpc.aio.insecure_channel(daemon.address) as channel:
        first = weights_pb2_grpc.WeightServiceStub(channel).PushWeights(requests(), timeout=120)
        async with asyncio.timeout(60):
            while True:
                try:
                    if (await client.get_push(raw_push.header.push_id)).push.received_bytes == 1000:
                        break
                except GenserveError:
                    await asyncio.sleep(0.02)
        with pytest.raises(ApplyInProgressError) as raised:
            await client.push_weights(checkpoints["a"], version=await next_version(client))
        assert raised.value.metadata["push_id"] == raw_push.header.push_id
        first.cancel()
    version = await next_version(client)
    async with asyncio.timeout(60):
        while True:
            try:
                await client.push_weights(checkpoints["a"], version=version)
                break
            except ApplyInProgressError:
                await asyncio.sleep(0.05)
    assert (await client.get_weights()).weight_version == version


async def test_a_repeated_push_id_is_applied_once(
    client: AsyncClient, restored: None, checkpoints: dict[str, Path]
) -> None:
    """A trainer whose answer was lost sends the same push again and gets the same answer."""
    version = await next_version(client)
    first = await client.push_weights(checkpoints["b"], version=version, push_id="once")
    again = await client.push_weights(checkpoints["b"], version=version, push_id="once")
    assert first.applied is not None and again.applied is not None
    assert again.applied.active_version == first.applied.active_version == version
    assert (await client.get_weights()).weight_version == version


async def test_a_manifest_can_be_validated_without_bytes(client: AsyncClient, checkpoints: dict[str, Path]) -> None:
    """VALIDATE is a dry run."""
    version = await next_version(client)
    result = await client.push_weights(checkpoints["b"], version=version, action="validate")
    assert result.push.state.lower() == "valid"
    assert await next_version(client) == version
