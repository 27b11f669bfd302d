"""The calls for LoRA adapters, over a real connection; what vLLM makes of adapters is tests/engine/test_lora.py."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from genserve.cli import main
from genserve.client import AsyncClient, Lora
from genserve.errors import (
    InvalidFieldError,
    LoraNotFoundError,
    ManifestMismatchError,
    UnsupportedError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from tests.support.refusals import refuses
from tests.support.scripted_adapter import CONFIG, TENSORS
from tests.support.scripted_daemon import Daemon


@pytest.fixture
async def client(daemon: Daemon) -> AsyncIterator[AsyncClient]:
    """One of the server."""
    async with AsyncClient(daemon.address) as connected:
        yield connected


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory as PEFT writes it."""
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": ["q"]}))
    return tmp_path


async def test_push_load_list_and_unload(daemon: Daemon, client: AsyncClient, saved: Path) -> None:
    """What each answers; PEFT's configuration may have sets."""
    daemon.engine.max_loras = 4
    pushed = await client.push_lora("pushed", TENSORS, CONFIG, push_id="p")
    assert (pushed.push.state, pushed.state.weight_version) == ("applied", 0)
    config = Path(daemon.engine.loras.files["pushed"].directory) / "adapter_config.json"
    assert json.loads(config.read_text()) == CONFIG | {"target_modules": ["q"]}
    loaded = await client.load_lora("loaded", saved)
    size_bytes = (saved / "adapter_model.safetensors").stat().st_size
    expected = Lora("loaded", 2, size_bytes, str(saved), datetime.fromtimestamp(1.5, UTC), 2, 1)
    assert loaded == expected
    assert [(lora.name, lora.source) for lora in await client.list_loras()] == [
        ("loaded", str(saved)),
        ("pushed", "push p"),
    ]
    assert await client.unload_lora("loaded") == expected
    await client.unload_lora("pushed")
    with pytest.raises(LoraNotFoundError, match="pushed"):
        await client.unload_lora("pushed")


async def test_a_push_gives_an_adapter_its_version(daemon: Daemon, client: AsyncClient, saved: Path) -> None:
    """Or the daemon does; the one that is served as weights stays."""
    daemon.engine.max_loras = 1
    told = [(await client.push_lora("x", TENSORS, CONFIG)).push.weight_version]
    told.append((await client.push_lora("x", TENSORS, CONFIG, version=500)).push.weight_version)
    with refuses(VersionNotNewerError, says="adapter 'x'"):
        await client.push_lora("x", TENSORS, CONFIG, version=500)
    with refuses(WeightVersionMismatchError, says="adapter 'x'"):
        await client.push_lora("x", TENSORS, CONFIG, expected_version=0)
    result = await client.push_lora("x", TENSORS, CONFIG, version=7, expected_version=500, force=True, push_id="p")
    told += [result.push.weight_version, (await client.get_push("p")).push.weight_version]
    told += [(await client.load_lora("x", saved)).version, *[lora.version for lora in await client.list_loras()]]
    assert told == [1, 500, 7, 7, 8, 8]
    assert result.applied is not None and result.applied.active_version == result.state.weight_version == 0
    with refuses(InvalidFieldError, field="header.weight_version", says="version"):
        await client.push_lora("x", TENSORS, CONFIG, version=-1)
    await client.unload_lora("x")


async def test_without_the_flag(client: AsyncClient, saved: Path) -> None:
    """Every call says which one is missing."""
    for call in (client.push_lora("x", saved), client.load_lora("x", saved), client.unload_lora("x")):
        with pytest.raises(UnsupportedError, match="--enable-lora"):
            await call
    assert await client.list_loras() == []
    assert "lora" not in (await client.server_info()).features


async def test_what_cannot_be_sent(daemon: Daemon, client: AsyncClient, saved: Path) -> None:
    """Here, or there by the path of the field."""
    daemon.engine.max_loras = 1
    with pytest.raises(TypeError, match="config"):
        await client.push_lora("x", TENSORS)
    with pytest.raises(TypeError, match="get_peft_model_state_dict"):
        await client.push_lora("x", torch.nn.Linear(1, 1), CONFIG)  # type: ignore[arg-type]
    for name in (1, ""):
        with refuses(InvalidFieldError, field="header.lora.lora_name"):
            await client.push_lora(name, TENSORS, CONFIG)  # type: ignore[arg-type]
    (saved / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a JSON object"):
        await client.push_lora("x", saved)
    with pytest.raises(InvalidFieldError) as caught:
        await client.load_lora("x", saved)
    assert caught.value.violations[0].field == "path: adapter_config.json"
    with pytest.raises(InvalidFieldError) as caught:
        await client.load_lora("x", saved, timeout_s=-1)
    assert caught.value.violations[0].field == "timeout"


async def test_tensors_of_another_rank_than_the_configuration(daemon: Daemon, client: AsyncClient) -> None:
    """Pushed, they would be scaled by the wrong rank: the error names the tensor and both, before a byte is sent."""
    daemon.engine.max_loras = 1
    with pytest.raises(ManifestMismatchError, match="rank 2") as caught:
        await client.push_lora("x", TENSORS, CONFIG | {"r": 8}, push_id="p")
    (violation,) = caught.value.violations
    assert violation.field == 'header.manifest.tensors["base_model.model.q.lora_A.weight"]'
    assert (daemon.engine.calls, list(daemon.registry.live)) == ([], [])


async def test_a_feature_that_vllm_does_not_have_is_refused_before_the_bytes(
    daemon: Daemon, client: AsyncClient, saved: Path
) -> None:
    """By the field that has it, pushed or loaded; nothing is staged for it."""
    daemon.engine.max_loras = 1
    with pytest.raises(InvalidFieldError, match="use_dora: DoRA") as caught:
        await client.push_lora("x", TENSORS, CONFIG | {"use_dora": True})
    assert caught.value.violations[0].field == "header.lora.config"
    (saved / "adapter_config.json").write_text(json.dumps(CONFIG | {"target_modules": ["q"], "bias": "all"}))
    with pytest.raises(InvalidFieldError, match="bias: ") as caught:
        await client.load_lora("x", saved)
    assert caught.value.violations[0].field == "path: adapter_config.json"
    assert (daemon.engine.calls, list(daemon.registry.live)) == ([], [])


async def test_a_configuration_that_is_not_utf_8_is_refused(client: AsyncClient, daemon: Daemon, saved: Path) -> None:
    """By its path, as one that is not JSON; it is no fault of the daemon."""
    daemon.engine.max_loras = 1
    text = json.dumps(CONFIG | {"target_modules": ["q"], "revision": "X"}).encode()
    (saved / "adapter_config.json").write_bytes(text.replace(b"X", b"\xe9"))
    with pytest.raises(InvalidFieldError) as caught:
        await client.load_lora("x", saved)
    assert caught.value.violations[0].field == "path: adapter_config.json"


async def test_two_tensors_for_one_half_of_a_module_are_refused(daemon: Daemon, client: AsyncClient) -> None:
    """With PEFT's prefix and without: vLLM takes the last of them, and leaves out the other without a word."""
    daemon.engine.max_loras = 1
    both = TENSORS | {name.removeprefix("base_model.model."): 2 * tensor for name, tensor in TENSORS.items()}
    with pytest.raises(ManifestMismatchError):
        await client.push_lora("x", both, CONFIG)


async def test_version_0_is_no_version_of_an_adapter(daemon: Daemon, client: AsyncClient) -> None:
    """A trainer that counts from 0 would find its step 0 labelled 1, and its step 1 refused."""
    daemon.engine.max_loras = 1
    with refuses(InvalidFieldError, field="header.weight_version", says="version"):
        await client.push_lora("x", TENSORS, CONFIG, version=0)
    assert await client.list_loras() == []


async def test_the_command_line(daemon: Daemon, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each shows what there is then."""
    daemon.engine.max_loras = 4

    async def run(*arguments: str) -> tuple[int, str, str]:
        status = await asyncio.to_thread(main, ["lora", *arguments, "--target", daemon.address])
        return status, *capsys.readouterr()

    assert await run("list") == (0, "no adapter is loaded\n", "")
    assert (await run("push", "one", str(saved), "--version", "7"))[0] == 0
    assert (await run("push", "one", str(saved), "--version", "6"))[0] == 1
    assert "version=0: must be above 0" in (await run("push", "one", str(saved), "--version", "0", "--force"))[2]
    assert (await run("push", "one", str(saved), "--version", "6", "--force"))[0] == 0
    status, shown, _ = await run("load", "second", str(saved))
    rows = [line.split() for line in shown.splitlines()]
    assert (status, rows[0]) == (0, ["NAME", "VERSION", "RANK", "SIZE", "REQUESTS", "FROM"])
    assert [row[:3] for row in rows[1:]] == [["one", "6", "2"], ["second", "1", "2"]]
    assert (await run("unload", "one"))[1].count("\n") == 2
    status, _, said = await run("unload", "one")
    assert (status, said) == (1, "genserve: LORA_NOT_FOUND: no adapter 'one' is loaded\n")
    await run("unload", "second")
    (saved / "adapter_model.safetensors").write_bytes(b"none")
    status, _, said = await run("push", "one", str(saved))
    assert (status, said.count("\n")) == (1, 1)
    assert "adapter_model.safetensors" in said
