"""The examples of the README and of three pages of docs, run against a real daemon at another address."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from genserve.client import AsyncClient
from tests.engine.examples import WRITTEN_ADDRESS, block
from tests.support import models
from tests.support.daemon_process import DaemonProcess

README = Path(__file__).parents[2] / "README.md"
QUICKSTART = README.parent / "docs" / "quickstart.md"
GUIDE = README.parent / "docs" / "weights.md"
LIFECYCLE = README.parent / "docs" / "lifecycle.md"
RECIPES = block("sh", "grpcurl", QUICKSTART).replace("\\\n ", "").strip().splitlines()


@pytest.mark.parametrize("word", ["commit_push", "partial=True", "threading", "pull_weights"])
async def test_an_example_of_the_guide_runs(
    client: AsyncClient,
    daemon: DaemonProcess,
    checkpoints: dict[str, Path],
    restored: None,
    tmp_path: Path,
    word: str,
) -> None:
    """As it stands, but for the address and the paths; what is served afterwards is what it says."""
    before = (await client.get_weights()).weight_version
    await client.push_weights(checkpoints["a"], version=before + 1)
    example = block("python", word, GUIDE).replace("/tmp", str(tmp_path)).replace(WRITTEN_ADDRESS, daemon.address)
    program = model_is(checkpoints["b"]) + example.replace("path/to/checkpoint", str(checkpoints["b"]))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    a, b = models.load_tensors(checkpoints["a"]), models.load_tensors(checkpoints["b"])
    expected = {
        "commit_push": b,
        "partial=True": {name: (b if "norm" in name else a)[name] for name in a},
        "threading": b,
        "pull_weights": a,
    }[word]
    pulled = await client.pull_weights()
    assert pulled.weight_version == before + (1 if word == "pull_weights" else 2)
    served = pulled.state_dict()
    assert served.keys() == expected.keys()
    assert all(torch.equal(served[name], tensor) for name, tensor in expected.items())


def model_is(checkpoint: Path) -> str:
    """A program's beginning in which `model` has the weights of a checkpoint."""
    return (
        "from pathlib import Path\nfrom tests.support import models\n"
        f"class model:\n    state_dict = staticmethod(lambda: models.load_tensors(Path({str(checkpoint)!r})))\n"
    )


async def test_the_ten_lines_of_a_trainer_run(
    client: AsyncClient, daemon: DaemonProcess, checkpoints: dict[str, Path], restored: None
) -> None:
    """`model` is a module of transformers. No answer is of the weights that somebody pushed before."""
    before = (await client.get_weights()).weight_version
    module = (
        "from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(checkpoints['b'])!r}, dtype='auto')\n"
    )
    program = module + block("python", "push_weights", README).replace(WRITTEN_ADDRESS, daemon.address)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("paused for") == 2
    assert f"version={before + 1}," in done.stdout
    assert f"version={before}," not in done.stdout
    assert (await client.get_weights()).weight_version == before + 3
    assert models.load_tensors(checkpoints["b"])


async def test_example_of_a_pause_leaves_the_engine_running(client: AsyncClient, daemon: DaemonProcess) -> None:
    """Paused inside its block, and without a lease afterwards."""
    program = block("python", "client.paused", LIFECYCLE).replace(WRITTEN_ADDRESS, daemon.address)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["paused"]
    state = (await client.status()).state
    assert (state.phase, state.pauses) == ("running", [])


@pytest.mark.parametrize("recipe", RECIPES, ids=[line.rsplit(" ", 1)[1].rsplit("/", 1)[-1] for line in RECIPES])
async def test_a_grpcurl_recipe_runs(client: AsyncClient, daemon: DaemonProcess, recipe: str) -> None:
    """With the real grpcurl; what comes back is JSON that reads well."""
    grpcurl = Path(sys.executable).with_name("grpcurl")
    command = recipe.replace(WRITTEN_ADDRESS, daemon.address).replace("grpcurl", str(grpcurl), 1)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    if "ControlService" in recipe:
        assert '"phase": "PHASE_' in done.stdout
    if "Generate" in recipe:
        # A message has all tokens that came since the one before: one, or more on a busy machine. The recipe samples,
        # so the model may end before the 8 tokens that it asks for.
        num_tokens = len([line for line in done.stdout.splitlines() if line.strip(" ,").isdigit()])
        reason = re.search(r'"reason": "FINISH_REASON_(\w+)"', done.stdout)
        assert reason and reason[1] in ({"LENGTH", "EOS"} if num_tokens == 8 else {"EOS"})
        assert 1 <= num_tokens <= 8 and f'"num_output_tokens": {num_tokens}' in done.stdout
    if "list" in recipe:
        assert "genserve.v1.WeightService" in done.stdout
    if "Pause" in recipe:
        assert '"holder": "ops"' in done.stdout
