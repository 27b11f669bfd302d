"""clients/python/examples: each program, run as its docstring says, against a real daemon."""

import ast
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from genserve.client import AsyncClient, Client
from tests.support import models
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.ports import free_port
from tests.support.released_package import ReleasedPackage
from tests.support.warm import process as warm

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "clients" / "python" / "examples"
NOTEBOOK = EXAMPLES / "first_steps.ipynb"
CHECKPOINT = "path/to/checkpoint"
NUM_STEPS = 3
LONG = pytest.mark.long("clients/python/examples", "genserve/client", "genserve/integrations")
LIMIT_S = 240.0


def commands(name: str) -> list[list[str]]:
    """The lines of a program's docstring that are commands: of the daemon, of pip, of the program."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text())) or ""
    return [shlex.split(line) for line in docstring.splitlines() if line.startswith("    ")]


def run(
    name: str, address: str, model: Path, cwd: Path, python: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Runs a program by the last command of its docstring, of which the checkpoint is another. `python`: of the
    environment that has its packages; None = that of the tests."""
    program, *arguments = commands(name)[-1]
    paths = {CHECKPOINT: str(model), f"clients/python/examples/{name}": str(EXAMPLES / name)}
    interpreter = [str(python or sys.executable), *(["-m", "torch.distributed.run"] if program == "torchrun" else [])]
    command = [*interpreter, *(paths.get(each, each) for each in arguments), "--target", address]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if python is None and program == "python":
        return warm.run([*command, "--steps", str(NUM_STEPS)], timeout=LIMIT_S, cwd=cwd, env=env)
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [*command, "--steps", str(NUM_STEPS)],
        **{"cwd": cwd, "env": env, "capture_output": True, "text": True, "timeout": LIMIT_S, "check": False},
    )


@contextmanager
def daemon_of(name: str, checkpoint: Path, directory: Path) -> Iterator[str]:
    """A daemon with the flags that a program's docstring names; its address."""
    program, *flags = commands(name)[0]
    assert (program, flags[:2]) == ("genserve", ["serve", CHECKPOINT])
    process = DaemonProcess(["--model", str(checkpoint), *flags[2:], *SMALL_ENGINE], directory / "stderr")
    try:
        yield process.wait_serving().address
    finally:
        process.end()


def steps_of(done: "subprocess.CompletedProcess[str]", line: str) -> list[tuple[str, ...]]:
    """What a pattern finds in the lines of a program's steps."""
    assert done.returncode == 0, done.stderr[-4000:]
    found = [re.fullmatch(line, each) for each in done.stdout.splitlines() if each.startswith("step ")]
    assert all(found), done.stdout
    return [each.groups() for each in found if each is not None]


async def test_a_loop_of_ones_own_pushes_a_version_for_each_step(
    client: AsyncClient, daemon: DaemonProcess, checkpoints: dict[str, Path], restored: None, tmp_path: Path
) -> None:
    """And one before the first answer, by which the daemon has the trainer's weights: other ones than it began with."""
    assert commands("own_loop.py")[0] == ["genserve", "serve", CHECKPOINT]
    before = (await client.get_weights()).weight_version
    done = await asyncio.to_thread(run, "own_loop.py", daemon.address, checkpoints["b"], tmp_path)
    assert done.stdout.startswith(f"version {before + 1} is served, the daemon is running\n"), done.stdout
    told = steps_of(done, r"step (\d+): reward \d\.\d{3}, version (\d+) is served")
    assert told == [(str(step), str(before + 1 + step)) for step in range(1, NUM_STEPS + 1)]
    served = await client.pull_weights()
    assert served.weight_version == before + 1 + NUM_STEPS
    begun = models.load_tensors(checkpoints["b"])
    assert served.state_dict().keys() == begun.keys()
    assert all((served.state_dict()[name].float() - begun[name].float()).abs().max() < 0.1 for name in begun)


@LONG
async def test_all_ranks_push_each_step(
    client: AsyncClient, daemon: DaemonProcess, checkpoints: dict[str, Path], restored: None, tmp_path: Path
) -> None:
    """Their parts are one version."""
    assert commands("fsdp.py")[0] == ["genserve", "serve", CHECKPOINT]
    before = (await client.get_weights()).weight_version
    done = await asyncio.to_thread(run, "fsdp.py", daemon.address, checkpoints["b"], tmp_path)
    told = steps_of(done, r"step (\d+): reward \d\.\d{3}, version (\d+) is served")
    assert told == [(str(step), str(before + 1 + step)) for step in range(1, NUM_STEPS + 1)]
    assert (await client.get_weights()).weight_version == before + 1 + NUM_STEPS


@LONG
def test_an_adapter_is_a_version_after_each_step(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The loss falls, and the weights below it are pushed once."""
    with daemon_of("lora.py", checkpoints["a"], tmp_path) as address, Client(address) as client:
        done = run("lora.py", address, checkpoints["b"], tmp_path, ReleasedPackage("peft").python())
        told = steps_of(done, r"step (\d+): loss (\d+\.\d{3}), version (\d+) of policy is served: .*")
        assert [(step, version) for step, _, version in told] == [(str(n), str(n)) for n in range(1, NUM_STEPS + 1)]
        losses = [float(loss) for _, loss, _ in told]
        assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
        assert client.get_weights().weight_version == 1
        assert [(lora.name, lora.version) for lora in client.list_loras()] == [("policy", NUM_STEPS)]


@LONG
def test_trls_trainer_pushes_before_each_step(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """So the first answers are of its weights, and each step has a version."""
    with daemon_of("trl_grpo.py", checkpoints["a"], tmp_path) as address, Client(address) as client:
        done = run("trl_grpo.py", address, checkpoints["b"], tmp_path, ReleasedPackage("trl").python())
        told = steps_of(done, r"step (\d+): reward \d\.\d{3}, version (\d+) is served")
        assert told == [(str(step), str(step)) for step in range(1, NUM_STEPS + 1)]
        assert client.get_weights().weight_version == NUM_STEPS


def code_cells(notebook: str) -> list[Any]:
    """Those of a notebook that are executed."""
    return [cell for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_kept_without_its_outputs() -> None:
    """They would differ after each run."""
    cells = code_cells(NOTEBOOK.read_text())
    assert cells
    assert [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None] == []


@pytest.mark.long("clients/python/examples", "clients/python/grpo/tiny_model.py", "genserve/launcher", "tests/nbclient")
@pytest.mark.timeout(900)
def test_the_reward_rises_in_the_notebook() -> None:
    """A kernel of Jupyter's executes all cells. Every version is served, and the last one has learnt."""
    package = ReleasedPackage("nbclient")
    done = package.run(package.program("execute.py"), 840, [str(NOTEBOOK)])
    assert done.returncode == 0, done.stderr[-4000:]
    printed = [
        "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")
        for cell in code_cells(done.stdout)
    ]
    (steps,) = [text for text in printed if "reward" in text]
    told = re.findall(r"^version +(\d+)  reward (\d\.\d\d)  #*$", steps, re.MULTILINE)
    assert [int(version) for version, _ in told] == list(range(2, 42))
    rewards = [float(reward) for _, reward in told]
    assert mean(rewards[-5:]) > 0.6 and mean(rewards[-5:]) > 4 * mean(rewards[:5]), rewards
    assert int(printed[-1].split()[0]) > 15 and "WeightSpan(version=41" in printed[-1], printed[-1]


@LONG
async def test_wrong_input_ends_in_a_line(
    client: AsyncClient, daemon: DaemonProcess, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """No daemon, a directory that is not there or is no model's, another model: nothing is pushed, and there is no
    traceback."""
    other = models.tiny_qwen3(tmp_path / "other", num_layers=1)
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    (nameless / "config.json").write_text("{}")
    before = (await client.get_weights()).weight_version
    nobody = f"127.0.0.1:{free_port()}"
    for address, model, says in (
        (nobody, checkpoints["a"], f"UnavailableError: no daemon answers at {nobody}"),
        (daemon.address, tmp_path / "nothing", "OSError: "),
        (daemon.address, nameless, "ValueError: Unrecognized model"),
        (daemon.address, other, "ManifestMismatchError: "),
    ):
        done = await asyncio.to_thread(run, "own_loop.py", address, model, tmp_path)
        assert (done.returncode, done.stdout) == (1, "")
        assert "Traceback" not in done.stderr
        assert any(line.startswith(says) for line in done.stderr.splitlines()), done.stderr
    assert (await client.get_weights()).weight_version == before
