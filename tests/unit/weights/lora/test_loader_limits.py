"""Loading an adapter: the time that is left for each step, and whose the files are when it fails."""

import asyncio
import json
import os
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from genserve.engine.protocol import LoraDirectory
from genserve.engine.types import LoadedLora
from genserve.errors import DeadlineError, PushRolledBackError
from tests.support.scripted_engine import ScriptedLoras
from tests.unit.weights.conftest import Rig, num_arenas

NO_TIME_S = 1e-9
"""Is over before a file is read."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An adapter as PEFT saves it."""
    module = "base_model.model.layers.0.q"
    halves = {"lora_A": numpy.zeros((2, 4), "float32"), "lora_B": numpy.zeros((6, 2), "float32")}
    save_file(
        {f"{module}.{half}.weight": array for half, array in halves.items()}, tmp_path / "adapter_model.safetensors"
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4, "target_modules": ["q"]}))
    return tmp_path


class StillReading(ScriptedLoras):
    """A worker goes on with what it was asked for after the call was given up."""

    def __init__(self, rig: Rig, error: BaseException) -> None:
        super().__init__(rig.engine)
        self.error = error
        self.reads: LoraDirectory | None = None

    async def load(self, name: str, files: LoraDirectory, timeout_s: float) -> LoadedLora:
        self.reads = files
        raise self.error


@pytest.mark.parametrize("error", [DeadlineError("late"), PushRolledBackError("no"), asyncio.CancelledError()])
async def test_files_belong_to_the_engine_from_when_it_was_asked_to_load_them(
    rig: Rig, directory: Path, error: BaseException
) -> None:
    """A rank may read them after the error: nobody but the engine takes them away."""
    rig.engine.max_loras = 1
    rig.engine.loras = StillReading(rig, error)
    with pytest.raises(type(error)):
        await rig.loras.load_directory("policy", str(directory), 30.0)
    reads = rig.engine.loras.reads
    assert reads is not None
    assert sorted(os.listdir(reads.directory)) == ["adapter_config.json", "adapter_model.safetensors"]
    reads.close()


async def test_the_engine_gets_what_is_left_of_the_time(rig: Rig, directory: Path) -> None:
    """Nothing, where the files took all of it; never more than the whole."""
    rig.engine.max_loras = 1
    rig.engine.hangs.add("load_lora")
    with pytest.raises(DeadlineError, match="load_lora took longer than 0 s"):
        await asyncio.wait_for(rig.loras.load_directory("policy", str(directory), NO_TIME_S), 10)
    with pytest.raises(DeadlineError, match=r"load_lora took longer than 0\.\d+ s"):
        await asyncio.wait_for(rig.loras.load_directory("policy", str(directory), 0.25), 10)


async def test_who_has_the_engine_is_not_waited_for_once_the_time_is_over(rig: Rig, directory: Path) -> None:
    """But for a millisecond, which tells whether somebody has it. The files are gone then."""
    rig.engine.max_loras, before = 1, num_arenas()
    async with rig.pauses.undisturbed(30.0):
        with pytest.raises(DeadlineError, match=r"kept the engine for 0\.001 s"):
            await rig.loras.load_directory("policy", str(directory), NO_TIME_S)
    assert (rig.engine.calls, num_arenas()) == ([], before)
