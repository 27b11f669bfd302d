"""What --keep-committed promises: a daemon that is killed comes back with the version that it served."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from genserve.cli import main
from genserve.client import AsyncClient
from genserve.weights.kept.checkpoint import digest_of, open_kept
from tests.support import models, patience
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess

pytestmark = pytest.mark.long(
    "genserve/weights/kept",
    "genserve/weights/load",
    "genserve/weights/resident.py",
    "genserve/control/drain.py",
    "genserve/daemon",
)

PROMPT = [9, 8, 7]


class Keeping:
    """A daemon on checkpoint a that keeps its version in `directory`, one process after the other."""

    def __init__(self, stack: AsyncExitStack, model: Path, directory: Path, logs: Path) -> None:
        self.directory = directory
        self._stack, self._model, self._logs = stack, model, logs
        self.num_started = 0

    async def start(self, model: Path | None = None, *, keeps: bool = True) -> tuple[DaemonProcess, AsyncClient]:
        """Another one, and its client."""
        self.num_started += 1
        flags = ["--model", str(model or self._model), "--frontends", "1", *SMALL_ENGINE]
        flags += ["--keep-committed", str(self.directory)] if keeps else []
        process = DaemonProcess(flags, self._logs / f"{self.num_started}.log")
        self._stack.callback(process.kill)
        process.wait_serving()
        return process, await self._stack.enter_async_context(AsyncClient(process.address))

    def version(self) -> int:
        """That is on the disk; 0 = none."""
        record = self.directory / "current" / "genserve.json"
        return int(json.loads(record.read_text())["weight_version"]) if record.exists() else 0

    async def until_kept(self, version: int) -> None:
        """Waits until it is whole on the disk."""
        await patience.until(lambda: self.version() == version)


@pytest.fixture
async def stack() -> Any:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for two versions and a half."""
    (mounted := tmp_path / "disk").mkdir()
    size = sum(each.stat().st_size for each in models.tiny_qwen3(tmp_path / "size").iterdir()) * 5 // 2
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(mounted)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("only root mounts a small disk")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)


async def seen(client: AsyncClient) -> tuple[int, str, dict[Any, str], list[int]]:
    """By what a version is known: number, push, digests of the live tensors, and greedy tokens, which carry it."""
    served = await client.get_weights(include_digests=True)
    generation = await client.generate(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True)
    assert {span.version for each in generation.sequences for span in each.weight_spans} == {served.weight_version}
    return served.weight_version, served.push_id, dict(served.digests), list(generation.token_ids)


def killed(process: DaemonProcess) -> None:
    """As the kernel does when memory is short."""
    os.kill(process.process.pid, signal.SIGKILL)
    process.kill()


@pytest.mark.timeout(600)  # it starts daemons, one after the other
async def test_a_daemon_that_is_killed_comes_back_with_its_version(
    stack: AsyncExitStack, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Tokens and digests are those from before, also of a push that brought a part, or other types than the checkpoint
    has; and without the daemon, as the files are a model for anybody. A rollback brings the version before that."""
    keeping = Keeping(stack, checkpoints["a"], tmp_path / "kept", tmp_path)
    process, client = await keeping.start()
    assert "the checkpoint is served" in process.stderr
    pushed = models.in_types(checkpoints["b"], tmp_path / "pushed", ["float32", "bfloat16", "float16"])
    await client.push_weights(pushed, version=7, push_id="kept whole")
    await keeping.until_kept(7)
    whole = await seen(client)
    norm = {"model.norm.weight": models.load_tensors(checkpoints["b"])["model.norm.weight"] * 2}
    await client.push_weights(norm, version=9, push_id="part", partial=True)
    await keeping.until_kept(9)
    part = await seen(client)
    assert whole[2:] != part[2:]
    killed(process)

    process, client = await keeping.start()
    assert "version 9" in process.stderr
    assert await seen(client) == part
    served = await client.get_weights()
    assert served.resident and served.content_digest == digest_of(open_kept(keeping.directory / "current"))
    assert main(["rollback", "--target", process.address]) == 0
    number, push_id, *rest = await seen(client)
    assert (number, tuple(rest)) == (7, whole[2:]) and push_id not in ("kept whole", "part")
    await keeping.until_kept(7)
    assert process.stop() == 0

    process, client = await keeping.start(keeping.directory / "current", keeps=False)
    assert (await seen(client))[2:] == whole[2:]
    check_transformers(keeping.directory / "current", whole[3])


def check_transformers(directory: Path, tokens: list[int]) -> None:
    """Loads all of it, and says the same."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, told = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    assert AutoTokenizer.from_pretrained(directory).decode([1, 2])
    ids = torch.tensor([PROMPT + tokens])
    expected = model(ids).logits[0, len(PROMPT) - 1 : -1]
    # Rounding may decide between two tokens that are alike.
    best, chosen = expected.max(-1).values, expected.gather(-1, ids[0, len(PROMPT) :, None])[:, 0]
    assert torch.all(best - chosen < 0.1)


@pytest.mark.timeout(600)
async def test_daemon_killed_while_writing_comes_back_with_a_whole_version(
    stack: AsyncExitStack, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The one before, of which nothing was touched; what was begun is gone."""
    keeping = Keeping(stack, checkpoints["a"], tmp_path / "kept", tmp_path)
    process, client = await keeping.start()
    await client.push_weights(checkpoints["b"], version=1)
    await keeping.until_kept(1)
    first = await seen(client)
    writing = keeping.directory / "writing"
    for version in range(2, 30):
        process.process.send_signal(signal.SIGCONT)
        await client.push_weights(checkpoints["a" if version % 2 == 0 else "b"], version=version)
        patience.wait_until(lambda: writing.exists() or keeping.version() == version)  # noqa: B023
        process.process.send_signal(signal.SIGSTOP)
        if writing.exists() and not (writing / "genserve.json").exists():
            break
    else:
        raise AssertionError("it was never caught writing")
    before = keeping.version()
    killed(process)
    process, client = await keeping.start()
    assert not writing.exists()
    number, _, digests, tokens = await seen(client)
    assert number == before
    if number % 2:  # of checkpoint b, as the first one
        assert (digests, tokens) == first[2:]
    await client.push_weights(checkpoints["b"], version=50)
    await keeping.until_kept(50)


async def test_a_full_disk_harms_neither_serving_nor_the_next_push(
    stack: AsyncExitStack, checkpoints: dict[str, Path], small_disk: Path, tmp_path: Path
) -> None:
    """It is told, and what was kept stays. With room again, the next version is kept."""
    keeping = Keeping(stack, checkpoints["a"], small_disk / "kept", tmp_path)
    process, client = await keeping.start()
    for version in (1, 2):
        await client.push_weights(checkpoints["b"], version=version)
        await keeping.until_kept(version)
    await client.push_weights(checkpoints["a"], version=3)
    await process.until_said("version 3 is not kept")
    assert "No space left on device" in process.stderr
    assert keeping.version() == 2 and not (keeping.directory / "writing").exists()
    assert (await seen(client))[0] == 3
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    await client.push_weights(checkpoints["b"], version=4)
    await keeping.until_kept(4)
    assert process.stop() == 0


async def test_a_start_that_cannot_serve_what_is_kept_says_so_at_once(
    stack: AsyncExitStack, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """In one line, before the engine starts: another daemon has the directory, or it is of another model."""
    keeping = Keeping(stack, checkpoints["a"], tmp_path / "kept", tmp_path)
    process, client = await keeping.start()
    await client.push_weights(checkpoints["b"], version=5)
    await keeping.until_kept(5)
    other = models.tiny_qwen3(tmp_path / "other", hidden=64)
    for model, said in ((checkpoints["a"], "its own directory"), (other, "does not belong to --model")):
        with pytest.raises(AssertionError, match="ended with 1"):
            await keeping.start(model)
        last = (tmp_path / f"{keeping.num_started}.log").read_text().splitlines()[-1]
        assert last.startswith("genserve: ") and said in last
        process.kill()


@pytest.mark.parametrize("ends", ["in order", "with its engine"])
async def test_a_daemon_that_ends_keeps_what_it_serves_first(stack: AsyncExitStack, tmp_path: Path, ends: str) -> None:
    """A push that was answered is on the disk when the process has ended, also of a model that takes time to write."""
    model = models.tiny_qwen3(tmp_path / "model", hidden=1024, num_layers=6)
    keeping = Keeping(stack, model, tmp_path / "kept", tmp_path)
    process, client = await keeping.start()
    await client.push_weights(models.perturbed(model, tmp_path / "pushed", seed=1), version=5)
    if ends == "in order":
        assert process.stop() == 0
    else:
        process.descendant("EngineCore").kill()
        assert process.exit_status(60) == 1
    assert keeping.version() == 5
