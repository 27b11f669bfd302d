"""LoRA adapters on real vLLM, in float32, where an adapter and weights that it is merged into say the same."""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from genserve.client import AsyncClient, Generation, WeightSpan
from genserve.errors import (
    DeadlineError,
    InvalidFieldError,
    LoraNotFoundError,
    ManifestMismatchError,
    PushConflictError,
    PushRolledBackError,
    StagingFullError,
)
from tests.engine.examples import WRITTEN_ADDRESS, block
from tests.support import models
from tests.support.adapters import CONFIG, PROMPT, VOCABULARY, Tensors, adapter, merged, saved, scores
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.patience import until
from tests.support.refusals import refuses

MAX_LORAS = 3


def directories(daemon: DaemonProcess) -> list[Path]:
    """What the daemon has on disk: links alone."""
    return list(Path(tempfile.gettempdir()).glob(f"genserve-lora-{daemon.process.pid}-*"))


@pytest.fixture(scope="module")
def lora_daemon(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """A daemon in float32 that holds three adapters and runs two at a time."""
    flags = ["--model", str(checkpoints["a"]), *SMALL_ENGINE, "--dtype", "float32", "--enable-lora"]
    flags += [
        "--max-logprobs",
        str(VOCABULARY),
        "--max-loras",
        "2",
        "--max-cpu-loras",
        str(MAX_LORAS),
        "--max-lora-rank",
        "8",
    ]
    process = DaemonProcess(flags, tmp_path_factory.mktemp("lora_daemon") / "stderr")
    try:
        yield process.wait_serving()
    finally:
        process.end()


@pytest.fixture
async def client(lora_daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    """A client of it. All adapters are gone afterwards."""
    async with AsyncClient(lora_daemon.address) as connected:
        yield connected
        for lora in await connected.list_loras():
            await connected.unload_lora(lora.name)
        await until(lambda: not directories(lora_daemon))


@pytest.fixture
def version() -> Callable[[], int]:
    """Versions that rise from test to test."""
    return lambda: next(_VERSIONS)


_VERSIONS = itertools.count(1)


async def test_adapters_say_what_merged_weights_say(
    client: AsyncClient, checkpoints: dict[str, Path], version: Callable[[], int]
) -> None:
    """Two at once, beside requests without any; then on other weights, pushed beneath them."""
    one, two = adapter(checkpoints["a"], seed=1), adapter(checkpoints["a"], seed=2)
    pushed = await client.push_lora("one", one, CONFIG)
    assert pushed.applied is not None
    assert pushed.applied.previous_version == pushed.applied.active_version == pushed.state.weight_version
    await client.push_lora("two", two, CONFIG)
    for name in ("a", "b"):
        await client.push_weights(models.load_tensors(checkpoints[name]), version=version())
        together = await in_one_step(client, "", "one", "two")
        weights = [merged(checkpoints[name], tensors) for tensors in ({}, one, two)]
        for found, tensors in zip(together, weights, strict=True):
            await client.push_weights(tensors, version=version())
            assert found == pytest.approx(await scores(client), abs=2e-3)
        (base, first, second) = together
        assert max(abs(x - y) for x, y in zip(base, first, strict=True)) > 0.5
        assert max(abs(x - y) for x, y in zip(first, second, strict=True)) > 0.5


async def test_an_adapter_of_the_embeddings_leaves_requests_without_one_alone(
    client: AsyncClient, checkpoints: dict[str, Path], version: Callable[[], int]
) -> None:
    """In one step with them; its first half is a table, in which rows are looked up."""
    weights = models.load_tensors(checkpoints["a"])
    await client.push_weights(weights, version=version())
    vocabulary, width = weights["model.embed_tokens.weight"].shape
    generator, name = torch.Generator().manual_seed(1), "base_model.model.model.embed_tokens.lora_embedding"
    for lora_name in ("one", "two"):
        a, b = torch.randn(4, vocabulary, generator=generator), torch.randn(width, 4, generator=generator)
        config = {**CONFIG, "target_modules": ["embed_tokens"]}
        await client.push_lora(lora_name, {f"{name}_A": a, f"{name}_B": b}, config)
    alone = await scores(client)
    base, one, two = await in_one_step(client, "", "one", "two")
    assert base == pytest.approx(alone, abs=2e-3)
    assert max(abs(x - y) for x, y in zip(base, one, strict=True)) > 0.5
    assert max(abs(x - y) for x, y in zip(one, two, strict=True)) > 0.5


async def in_one_step(client: AsyncClient, *loras: str) -> list[list[float]]:
    """The scores with each of these adapters, all computed at once."""
    async with client.paused():
        waiting = asyncio.gather(*(scores(client, lora) for lora in loras))
        async with asyncio.timeout(60):
            while (load := (await client.status()).load).running + load.waiting < len(loras):
                await asyncio.sleep(0.02)
    return await waiting


async def test_an_adapter_is_replaced_between_requests(
    client: AsyncClient, checkpoints: dict[str, Path], lora_daemon: DaemonProcess
) -> None:
    """A stream goes on with the one that it began with; later requests never see keys and values of the old one, which
    goes when nobody uses it."""
    options: Any = {"temperature": 0.0, "max_tokens": 600, "ignore_eos": True, "lora_name": "policy"}
    await client.push_lora("policy", adapter(checkpoints["a"], seed=1), CONFIG)
    expected = (await client.generate(PROMPT, **options)).token_ids
    old_scores = await scores(client, "policy")
    found: list[int] = []
    async with client.stream(PROMPT, **(options | {"max_tokens": 1900})) as stream:
        async for delta in stream:
            if not found:
                await client.push_lora("policy", adapter(checkpoints["a"], seed=2), CONFIG)
                assert [lora.running_requests for lora in await client.list_loras()] == [0]
                assert len(directories(lora_daemon)) == 2
                new_scores = await scores(client, "policy")
            found += delta.outputs[0].token_ids
            if len(found) >= len(expected):
                break
    assert found[: len(expected)] == expected
    assert max(abs(x - y) for x, y in zip(old_scores, new_scores, strict=True)) > 0.5
    await until(lambda: len(directories(lora_daemon)) <= 1)
    assert await scores(client, "policy") == pytest.approx(new_scores, abs=1e-4)


async def test_each_token_is_labelled_with_the_adapter_version_that_sampled_it(
    client: AsyncClient, checkpoints: dict[str, Path]
) -> None:
    """A trainer pushes under one name while requests run. Tokens, those that come after the pushes too, are what the
    labelled version says when nothing else is loaded; also in columns, beside requests without an adapter."""
    options: Any = {"temperature": 0.0, "max_tokens": 1900, "ignore_eos": True, "lora_name": "policy"}
    weights = (await client.get_weights()).weight_version
    answers: list[tuple[int, list[int]]] = []  # the label of all tokens, and the tokens

    async def push(number: int, version: int | None) -> None:
        pushed = await client.push_lora("policy", adapter(checkpoints["a"], seed=number), CONFIG, version=version)
        assert pushed.push.weight_version == number
        assert [(lora.name, lora.version) for lora in await client.list_loras()] == [("policy", number)]

    async def ask_in_columns(number: int) -> None:
        found = {"policy": Generation(), "": Generation()}
        async with client.stream_many() as many:
            for name in found:
                await many.submit(PROMPT, request_id=f"of {name}", **(options | {"max_tokens": 24, "lora_name": name}))
            await many.done()
            async for item in many:
                assert item.delta is not None
                found[item.request_id.removeprefix("of ")].add(item.delta)
        for name, label in (("policy", number), ("", 0)):
            (sequence,) = found[name].sequences
            assert sequence.weight_spans == [(weights, 0, 24, label)]
            answers.append((label, sequence.token_ids))

    await push(5, 5)
    tokens: list[int] = []
    spans: list[WeightSpan] = []
    wanted = 0
    async with client.stream(PROMPT, **options) as stream:
        async for delta in stream:
            if not tokens:
                for number, version in ((6, 6), (7, None)):
                    await push(number, version)
                    await ask_in_columns(number)
            elif not wanted:  # this much had come before the pushes were over
                wanted = len(tokens) + len(delta.outputs[0].token_ids) + 24
            tokens += delta.outputs[0].token_ids
            spans += delta.outputs[0].weight_spans
            if 0 < wanted <= len(tokens):
                break
    assert 0 < wanted <= len(tokens), "the pushes took longer than the stream"
    assert {(span.version, span.lora_version) for span in spans} == {(weights, 5)}
    for label, told in [*answers, (5, tokens)]:
        if label:
            await client.push_lora("cold", adapter(checkpoints["a"], seed=label), CONFIG)
        asked = options | {"max_tokens": len(told), "lora_name": "cold" if label else ""}
        assert (await client.generate(PROMPT, **asked)).token_ids == told
    assert len({tuple(told[:24]) for _, told in [*answers, (5, tokens)]}) == 4, "else a wrong label would not show"


async def test_unloaded_while_it_is_used(
    client: AsyncClient, checkpoints: dict[str, Path], lora_daemon: DaemonProcess
) -> None:
    """Its requests go on, whether they end by themselves, by a stop string, or because the client went away."""
    await client.push_lora("policy", adapter(checkpoints["a"], seed=1), CONFIG)
    options: Any = {"max_tokens": 1500, "ignore_eos": True, "lora_name": "policy", "seed": 1}
    streams = [
        client.stream(PROMPT, **options),
        client.stream(PROMPT, **(options | {"max_tokens": 300, "stop": ["e"]})),
    ]
    for stream in streams:
        await anext(stream)
    unloaded = await client.unload_lora("policy")
    assert 1 <= unloaded.running_requests <= 2
    assert await client.list_loras() == []
    with pytest.raises(LoraNotFoundError, match="policy"):
        await client.generate(PROMPT, **options)
    with pytest.raises(LoraNotFoundError):
        await client.unload_lora("policy")
    async for _ in streams[1]:
        pass
    await streams[0].aclose()
    await until(lambda: not directories(lora_daemon))
    assert len((await client.generate(PROMPT, max_tokens=4, ignore_eos=True)).token_ids) == 4


async def test_from_a_directory(client: AsyncClient, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Of the daemon's host, or of the client's; the files are not needed afterwards, also when vLLM reads again."""
    tensors = adapter(checkpoints["a"], seed=1)
    directory = saved(tensors, tmp_path / "saved")
    loaded = await client.load_lora("disk", directory)
    assert (loaded.rank, loaded.source) == (4, str(directory))
    await client.push_lora("memory", directory)
    for path in [*directory.iterdir(), directory]:
        path.unlink() if path.is_file() else path.rmdir()
    await client.push_lora("tensors", tensors, CONFIG)
    assert await scores(client, "disk") == await scores(client, "memory") == await scores(client, "tensors")
    assert [lora.name for lora in await client.list_loras()] == ["disk", "memory", "tensors"]
    with refuses(InvalidFieldError, says="adapter_config"):
        await client.load_lora("disk", directory)
    with refuses(InvalidFieldError, field="path"):
        await client.load_lora("disk", "saved")


@pytest.mark.parametrize("wrong", ["model.language_model.", "_orig_mod.model.", "model.model.", "transformer."])
async def test_an_adapter_that_reaches_no_layer_is_refused(
    client: AsyncClient, checkpoints: dict[str, Path], tmp_path: Path, wrong: str
) -> None:
    """vLLM would load it, list it, and answer as the base model does. The error names modules, and nothing changes."""
    good = adapter(checkpoints["a"], seed=1)
    await client.push_lora("policy", good, CONFIG)
    before = await scores(client, "policy")
    renamed = {name.replace("base_model.model.model.", f"base_model.model.{wrong}"): t for name, t in good.items()}
    for name in ("policy", "other"):
        with refuses(ManifestMismatchError, field="header.manifest", says="layers.0.mlp.gate_proj"):
            await client.push_lora(name, renamed, CONFIG)
    with refuses(InvalidFieldError, field="path", says="layers.0.mlp.gate_proj"):
        await client.load_lora("other", saved(renamed, tmp_path / "saved"))
    assert [lora.name for lora in await client.list_loras()] == ["policy"]
    assert await scores(client, "policy") == before


async def test_what_does_not_fit_changes_nothing(
    client: AsyncClient, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The error names the tensor or the setting, whoever finds it, and the adapter that is loaded stays."""
    good = adapter(checkpoints["a"], seed=1)
    await client.push_lora("policy", good, CONFIG)
    before, (name, tensor) = await scores(client, "policy"), next(iter(good.items()))
    b = name.replace("lora_A", "lora_B")
    bad_tensors: dict[str, Tensors] = {
        "is missing its A": {key: value for key, value in good.items() if key != name},
        "has rank 4, and its B 3": good | {b: good[b][:, :3]},
        "columns": good | {name: torch.cat([tensor, tensor], 1)},
        "does not have": good | {key.replace("layers.0", "layers.7"): value.clone() for key, value in good.items()},
        "modules_to_save": good | {"model.norm.weight": torch.zeros(128)},
    }
    for words, tensors in bad_tensors.items():
        with pytest.raises(ManifestMismatchError, match=words):
            await client.push_lora("policy", tensors, CONFIG)
    no_rank = {"lora_alpha": 8, "target_modules": []}
    for config, words in (
        (CONFIG | {"r": 64}, "--max-lora-rank 8"),
        (CONFIG | {"r": 0}, "above 0"),
        (no_rank, "lacks r"),
        (CONFIG | {"use_dora": True}, "use_dora: DoRA"),
    ):
        with refuses(InvalidFieldError, field="header.lora.config", says=words):
            await client.push_lora("policy", good, config)
    with pytest.raises(PushRolledBackError, match="PiSSA"):
        await client.push_lora("policy", good, CONFIG | {"init_lora_weights": "pissa"})
    with refuses(InvalidFieldError, field="output.prompt_logprobs"):
        await client.generate(PROMPT, prompt_logprobs=0)
    with refuses(InvalidFieldError, says="lora_name"):
        await client.push_lora("", good, CONFIG)
    with pytest.raises(InvalidFieldError, match=r"layers\.7"):
        await client.load_lora("policy", saved(bad_tensors["does not have"], tmp_path / "bad"))
    (tmp_path / "bad" / "adapter_model.safetensors").write_bytes(b"no safetensors")
    with refuses(InvalidFieldError, says="safetensors"):
        await client.load_lora("policy", tmp_path / "bad")
    with pytest.raises(DeadlineError):
        await client.load_lora("policy", saved(good, tmp_path / "late"), timeout_s=0.0001)
    assert await scores(client, "policy") == pytest.approx(before, abs=1e-4)


async def test_the_example_of_the_guide_runs(
    client: AsyncClient, lora_daemon: DaemonProcess, checkpoints: dict[str, Path]
) -> None:
    """With an adapter in the place of `tensors`."""
    example = block("python", "push_lora", Path(__file__).parents[2] / "docs" / "lora.md")
    names = {"tensors": adapter(checkpoints["a"], seed=1)}
    await asyncio.to_thread(exec, example.replace(WRITTEN_ADDRESS, lora_daemon.address), names)
    assert await client.list_loras() == []


async def test_no_more_than_workers_can_hold(client: AsyncClient, checkpoints: dict[str, Path]) -> None:
    """vLLM would drop the one that was used least; a place that becomes free is waited for."""
    for number in range(MAX_LORAS):
        await client.push_lora(f"lora-{number}", adapter(checkpoints["a"], seed=number), CONFIG)
    with pytest.raises(StagingFullError, match="lora-0, lora-1, lora-2"):
        await client.push_lora("lora-3", adapter(checkpoints["a"], seed=3), CONFIG)
    kept = [await scores(client, f"lora-{number}") for number in (0, 2)]
    await client.unload_lora("lora-1")
    await client.push_lora("lora-3", adapter(checkpoints["a"], seed=3), CONFIG)
    assert [lora.name for lora in await client.list_loras()] == ["lora-0", "lora-2", "lora-3"]
    assert [await scores(client, f"lora-{number}") for number in (0, 2)] == kept


async def test_an_adapter_is_a_push(client: AsyncClient, checkpoints: dict[str, Path]) -> None:
    """A repeat loads the same adapter again; other tensors or another name under its id are refused."""
    tensors = adapter(checkpoints["a"], seed=1)
    first = await client.push_lora("policy", tensors, CONFIG, push_id="adapter-1")
    again = await client.push_lora("policy", tensors, CONFIG, push_id="adapter-1")
    assert (first.push.state, again.push.state) == ("applied", "applied")
    told = await client.get_push("adapter-1")
    assert (told.push.state, told.push.weight_version) == ("applied", again.push.weight_version)
    with pytest.raises(PushConflictError):
        await client.push_lora("other", tensors, CONFIG, push_id="adapter-1")
    with pytest.raises(PushConflictError):
        await client.push_lora("policy", adapter(checkpoints["a"], seed=1, rank=2), CONFIG, push_id="adapter-1")
    assert len(await client.list_loras()) == 1
