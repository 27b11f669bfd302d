"""Loading an adapter: what is refused, the time that is left for each step, and whose the files are when it fails."""

import asyncio
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from genserve.control.conditions import Phase
from genserve.engine.protocol import LoraDirectory
from genserve.engine.types import LoadedLora
from genserve.errors import (
    DeadlineError,
    DrainingError,
    EngineDeadError,
    GenserveError,
    InvalidFieldError,
    PushRolledBackError,
    UnsupportedError,
    VersionNotNewerError,
    WeightVersionMismatchError,
)
from genserve.weights.lora.files import LoraFiles
from genserve.weights.push.types import MAX_VERSION, ApplyOptions, LoraAdapter, PushAction, PushHeader, PushState
from tests.support.clocks import advanced_clock
from tests.support.patience import until
from tests.support.phases import enter_phase
from tests.support.refusals import refuses
from tests.support.scripted_engine import Gate, ScriptedLoras
from tests.unit.weights.conftest import Rig, after, nothing_runs, num_arenas, open_rig, send
from tests.unit.weights.conftest import header as weights_header
from tests.unit.weights.lora.adapter import CONFIG, TENSORS, A, B, space
from tests.unit.weights.prepared import is_preparing

NO_TIME_S = 1e-9
"""Is over before a file is read."""


def header(**fields: Any) -> PushHeader:
    """Of a push of TENSORS as "policy"."""
    return PushHeader("lora", 0, manifest=space(TENSORS)[0], lora=LoraAdapter("policy", CONFIG), **fields)


async def test_a_pushed_adapter_is_loaded(rig: Rig) -> None:
    """In pieces, resumed, staged and committed; a repeat answers the same, and no weight has changed."""
    rig.engine.max_loras, data = 1, space(TENSORS)[1]
    opened = replace(header(action=PushAction.STAGE), attempt="a")
    stream = await rig.registry.open(opened)
    send(stream, data, 0, 10)
    stream.detach()
    assert rig.registry.report("lora").push.missing == ((10, len(data)),)
    stream = await rig.registry.open(opened)
    send(stream, data, 10)
    assert (await stream.finish()).push.state is PushState.STAGED
    stream.detach()
    assert rig.engine.loras.files == {}
    outcome = await rig.registry.commit("lora", header().apply)
    assert (outcome.push.state, outcome.push.lora_name, rig.engine.weight_version) == (PushState.APPLIED, "policy", 0)
    assert await rig.registry.commit("lora", header().apply) == outcome
    loaded = load_file(Path(rig.engine.loras.files["policy"].directory) / "adapter_model.safetensors")
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert rig.engine.calls == ["load_lora policy"]
    rig.engine.loras.unload("policy")


async def test_the_time_of_an_adapter_is_told_step_by_step(rig: Rig) -> None:
    """Nothing is paused for it, and no version comes of it."""
    rig.engine.max_loras = 1
    began_s = time.perf_counter()
    applied = (await rig.push(header(), space(TENSORS)[1])).applied
    elapsed_s = time.perf_counter() - began_s
    assert applied is not None
    assert list(applied.step_s) == ["open", "receive", "verify", "check", "wait", "prepare", "commit"]
    assert all(0 < step_s < elapsed_s for step_s in applied.step_s.values())
    assert (applied.previous_version, applied.active_version, applied.paused_s) == (0, 0, 0.0)
    assert (applied.requests_kept, applied.requests_aborted) == (0, 0)
    rig.engine.loras.unload("policy")


async def test_an_adapter_leaves_the_room_of_the_next_version_alone(rig: Rig) -> None:
    """The two arenas of versions take turns; an adapter has memory of its own."""
    for version in (1, 2):
        await rig.push(weights_header(f"p{version}", version))
    rig.engine.max_loras, before = 1, num_arenas()
    await rig.push(header(), space(TENSORS)[1])
    assert num_arenas() == before + 2  # the files of the adapter
    rig.engine.loras.unload("policy")
    assert num_arenas() == before


async def test_an_adapter_that_cannot_be_loaded_stays_staged(rig: Rig) -> None:
    """Nothing is lost: a commit tries again."""
    rig.engine.max_loras, rig.engine.fails["load_lora"] = 1, RuntimeError("no room")
    with pytest.raises(RuntimeError, match="no room"):
        await rig.push(header(), space(TENSORS)[1])
    assert rig.registry.report("lora").push.state is PushState.FAILED
    assert (await rig.registry.commit("lora", header().apply)).push.state is PushState.APPLIED
    rig.engine.loras.unload("policy")


def named(push_id: str, version: int, **fields: Any) -> PushHeader:
    """Of a push of the adapter under this id and version."""
    return replace(header(**fields), push_id=push_id, weight_version=version)


async def test_an_adapter_has_a_version_of_its_own(rig: Rig, saved: Path) -> None:
    """Above that of the one it replaces, or the next one if nobody gives it; weights keep theirs."""
    rig.engine.max_loras, data = 4, space(TENSORS)[1]
    for version, expected in ((0, 1), (5, 5), (0, 6)):
        outcome = await rig.push(named(f"v{expected}", version), data)
        assert outcome.push.weight_version == rig.loras.version("policy") == expected
        assert rig.registry.report(f"v{expected}").push.weight_version == expected
    for version in (5, 6):
        with refuses(VersionNotNewerError, says="policy"):
            await rig.registry.open(named("old", version))
    with refuses(WeightVersionMismatchError, says="policy"):
        await rig.registry.open(named("other", 0, expected_version=5))
    await rig.push(named("back", 3, force=True, expected_version=6), data)
    assert (await rig.loras.load_directory("policy", str(saved), 60.0)).version == 4
    assert (await rig.loras.load_directory("other", str(saved), 60.0)).version == 1
    rig.loras.unload("policy")
    assert (await rig.push(named("first", 0, expected_version=0), data)).push.weight_version == 1
    assert rig.engine.weight_version == 0
    for name in ("policy", "other"):
        rig.loras.unload(name)


@pytest.mark.parametrize("version", [7, 0])
async def test_a_repeat_of_an_adapter_s_push_is_no_other_version(rig: Rig, version: int) -> None:
    """Its bytes are not kept: another attempt loads it again, unless a later version has come. The attempt that was
    applied gets its answer whatever has come."""
    rig.engine.max_loras, data = 1, space(TENSORS)[1]
    first = named("p", version, attempt="a", expected_version=0)
    assert (await rig.push(first, data)).push.weight_version == (version or 1)
    again = (await rig.push(replace(first, attempt="b"), data)).push.weight_version
    assert again == rig.loras.version("policy") == (version or 1)
    later = await rig.push(named("q", 8), data)
    assert (await rig.push(replace(first, attempt="b"), data)).push.weight_version == again
    with refuses(VersionNotNewerError):
        await rig.registry.open(replace(first, attempt="c"))
    assert rig.loras.version("policy") == later.push.weight_version == 8
    assert rig.engine.calls == ["load_lora policy"] * 3
    rig.loras.unload("policy")


@pytest.mark.parametrize("version", [7, 0])
async def test_a_repeat_with_force_brings_back_the_adapter_and_its_version(rig: Rig, version: int) -> None:
    """Its number is not that of another adapter, nor a new one."""
    rig.engine.max_loras, data = 1, space(TENSORS)[1]
    await rig.push(named("p", version, attempt="a"), data)
    await rig.push(named("q", 8), data)
    back = await rig.push(named("p", version, attempt="b", force=True), data)
    assert back.push.weight_version == rig.loras.version("policy") == (version or 1)
    assert rig.loras.unload("policy").push_id == "p"


async def test_a_commit_loads_what_was_sent_again_unless_it_is_loaded(rig: Rig) -> None:
    """ "Applied" is said of what serves. Bytes that nobody needs are freed."""
    rig.engine.max_loras, data, before = 1, space(TENSORS)[1], num_arenas()
    staged = named("p", 1, action=PushAction.STAGE)
    await rig.push(replace(staged, attempt="a"), data)
    first = await rig.registry.commit("p", header().apply)
    await rig.push(replace(staged, attempt="b"), data)
    assert await rig.registry.commit("p", header().apply) == first
    assert (rig.engine.calls, list(rig.registry.live)) == (["load_lora policy"], [])
    rig.loras.unload("policy")
    assert await rig.registry.commit("p", header().apply) == first  # nothing was sent again: its answer was lost
    await rig.push(replace(staged, attempt="c"), data)
    assert (await rig.registry.commit("p", header().apply)).push.state is PushState.APPLIED
    assert (rig.loras.version("policy"), list(rig.registry.live)) == (1, [])
    rig.loras.unload("policy")
    assert num_arenas() == before


async def test_a_version_is_looked_at_again_when_the_bytes_are_there(rig: Rig, saved: Path) -> None:
    """Another one came under the name meanwhile, and stays."""
    rig.engine.max_loras = 1
    await rig.push(named("staged", 1, action=PushAction.STAGE), space(TENSORS)[1])
    await rig.loras.load_directory("policy", str(saved), 60.0)
    with refuses(VersionNotNewerError):
        await rig.registry.commit("staged", header().apply)
    assert rig.engine.calls == ["load_lora policy"]
    rig.loras.unload("policy")


async def test_after_the_last_version_there_is_no_next_one(rig: Rig, saved: Path) -> None:
    """Nothing is loaded that no span could name, nor read before it is refused."""
    rig.engine.max_loras, data = 1, space(TENSORS)[1]
    await rig.push(named("last", MAX_VERSION), data)
    with refuses(InvalidFieldError, field="lora_name"):
        await rig.push(named("next", 0), data)
    for path in (saved, saved / "not read"):
        with refuses(InvalidFieldError, field="lora_name"):
            await rig.loras.load_directory("policy", str(path), 60.0)
    assert rig.loras.version("policy") == MAX_VERSION
    rig.loras.unload("policy")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"weight_version": 1 << 32}, "header.weight_version"),
        ({"lora": LoraAdapter("", CONFIG)}, "header.lora.lora_name"),
        ({"lora": LoraAdapter("policy", "{}")}, "header.lora.config"),
    ],
)
async def test_headers_that_cannot_be(rig: Rig, fields: dict[str, Any], field: str) -> None:
    """The error has the path of the field."""
    rig.engine.max_loras = 1
    fields = {"push_id": "lora", "weight_version": 0, "manifest": space(TENSORS)[0], "lora": header().lora} | fields
    with refuses(InvalidFieldError, field=field):
        await rig.registry.open(PushHeader(**fields))


async def test_without_the_flag_there_are_no_adapters(rig: Rig) -> None:
    """It is named."""
    with refuses(UnsupportedError, says="--enable-lora"):
        await rig.registry.open(header())


async def test_a_directory_is_read_once(rig: Rig, saved: Path) -> None:
    """And checked as a push is."""
    rig.engine.max_loras = 1
    loaded = await rig.loras.load_directory("policy", str(saved), 60.0)
    assert (loaded.name, loaded.rank, loaded.source) == ("policy", 2, str(saved))
    (saved / "adapter_model.safetensors").unlink()
    assert load_file(Path(rig.engine.loras.files["policy"].directory) / "adapter_model.safetensors").keys() == {A, B}
    rig.loras.unload("policy")
    with refuses(InvalidFieldError, says="adapter_model.safetensors"):
        await rig.loras.load_directory("policy", str(saved), 60.0)


async def test_a_directory_whose_tensors_have_another_rank_is_refused(rig: Rig, saved: Path) -> None:
    """The error names the tensor and both ranks."""
    rig.engine.max_loras, before = 1, num_arenas()
    (saved / "adapter_config.json").write_text(CONFIG.replace('"r": 2', '"r": 4'))
    with refuses(InvalidFieldError, says=f"{A} has rank 2"):
        await rig.loras.load_directory("policy", str(saved), 60.0)
    assert rig.engine.calls == []
    assert num_arenas() == before


async def test_an_adapter_that_comes_too_late_holds_no_memory(rig: Rig, saved: Path) -> None:
    """Another update keeps the engine for longer than it may take: its files were made for nothing."""
    rig.engine.max_loras, before = 1, num_arenas()
    async with rig.pauses.undisturbed(60.0):
        loading = asyncio.create_task(rig.loras.load_directory("policy", str(saved), 60.0))
        with advanced_clock() as clock:
            await nothing_runs()
            with pytest.raises(DeadlineError):
                await after(clock, 61.0, loading)
    assert rig.engine.calls == []
    assert num_arenas() == before


async def test_a_directory_that_cannot_be_read_is_in_the_way_of_directories_alone(
    rig: Rig, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one on another host that is gone. Pushes are loaded meanwhile; another directory waits, because each
    keeps a thread, of which the daemon has few."""
    rig.engine.max_loras = 3
    is_back, reads, read = threading.Event(), list[Path](), LoraFiles.of_directory

    def hangs(path: Path, *given: Any) -> LoraFiles:
        reads.append(path)
        is_back.wait()
        return read(path, *given)

    monkeypatch.setattr(LoraFiles, "of_directory", hangs)
    loading = asyncio.create_task(rig.loras.load_directory("saved", str(saved), 600.0))
    try:
        await until(lambda: len(reads) == 1)
        with (
            advanced_clock() as clock,
            refuses(DeadlineError, says="another adapter was still being read or loaded after 60 s"),
        ):
            await after(clock, 60.1, rig.loras.load_directory("other", str(saved), 60.0))
        assert len(reads) == 1
        await rig.push(header(), space(TENSORS)[1])
        assert [each.name for each in rig.engine.loras.loaded()] == ["policy"]
    finally:
        is_back.set()
        await loading
    assert {each.name for each in rig.engine.loras.loaded()} == {"policy", "saved"}
    for name in ("policy", "saved"):
        rig.loras.unload(name)


async def test_a_push_that_waits_for_others_until_its_time_is_over_says_so(tmp_path: Path) -> None:
    """The one that is loaded meanwhile is not hurt by that."""
    second = replace(header(apply=ApplyOptions(timeout_s=60.0)), push_id="second", lora=LoraAdapter("cook", CONFIG))
    async with open_rig(tmp_path, max_staging_bytes=1 << 20) as rig:
        rig.engine.max_loras = 2
        gate = rig.engine.gates["load_lora"] = Gate()
        loading = asyncio.create_task(rig.push(header(apply=ApplyOptions(timeout_s=600.0)), space(TENSORS)[1]))
        await gate.reached.wait()
        with (
            advanced_clock() as clock,
            refuses(DeadlineError, says="another adapter was still being read or loaded after 60 s"),
        ):
            await after(clock, 60.1, rig.push(second, space(TENSORS)[1]), once=lambda: is_preparing(rig, "second"))
        gate.open.set()
        await loading
        assert [each.name for each in rig.engine.loras.loaded()] == ["policy"]
        rig.loras.unload("policy")


async def test_a_push_that_has_waited_for_others_has_less_time(tmp_path: Path) -> None:
    """What is left of its own."""
    second = replace(header(apply=ApplyOptions(timeout_s=60.0)), push_id="second", lora=LoraAdapter("cook", CONFIG))
    async with open_rig(tmp_path, max_staging_bytes=1 << 20) as rig:
        rig.engine.max_loras = 2
        gate = rig.engine.gates["load_lora"] = Gate()
        with advanced_clock() as clock:
            loading = asyncio.create_task(rig.push(header(apply=ApplyOptions(timeout_s=600.0)), space(TENSORS)[1]))
            await gate.reached.wait()
            waiting = asyncio.create_task(rig.push(second, space(TENSORS)[1]))
            await until(lambda: is_preparing(rig, "second"))
            await clock.advance(40.0)
            gate.open.set()
            await asyncio.gather(loading, waiting)
        assert 0 < rig.engine.timeouts_s["load_lora"] <= 20.0
        for name in ("policy", "cook"):
            rig.loras.unload(name)


@pytest.mark.parametrize(("phase", "error"), [(Phase.DRAINING, DrainingError), (Phase.DEAD, EngineDeadError)])
async def test_adapters_neither_come_nor_go_where_nothing_changes(
    rig: Rig, tmp_path: Path, phase: Phase, error: type[GenserveError]
) -> None:
    """A daemon that ends, and an engine that has."""
    rig.engine.max_loras = 1
    enter_phase(rig.board, phase)
    with pytest.raises(error):
        await rig.loras.load_directory("policy", str(tmp_path), 60.0)
    with pytest.raises(error):
        rig.loras.unload("policy")


class StillReading(ScriptedLoras):
    """A worker goes on with what it was asked for after the call was given up."""

    def __init__(self, rig: Rig, error: BaseException) -> None:
        super().__init__(rig.engine)
        self.error = error
        self.reads: LoraDirectory | None = None

    async def load(self, name: str, files: LoraDirectory, timeout_s: float, version: int = 0) -> LoadedLora:
        self.reads = files
        raise self.error


@pytest.mark.parametrize("error", [DeadlineError("late"), PushRolledBackError("no"), asyncio.CancelledError()])
async def test_files_belong_to_the_engine_from_when_it_was_asked_to_load_them(
    rig: Rig, saved: Path, error: BaseException
) -> None:
    """A rank may read them after the error: nobody but the engine takes them away."""
    rig.engine.max_loras = 1
    rig.engine.loras = StillReading(rig, error)
    with pytest.raises(type(error)):
        await rig.loras.load_directory("policy", str(saved), 30.0)
    reads = rig.engine.loras.reads
    assert reads is not None
    assert sorted(os.listdir(reads.directory)) == ["adapter_config.json", "adapter_model.safetensors"]
    reads.close()


async def test_the_engine_gets_what_is_left_of_the_time(rig: Rig, saved: Path) -> None:
    """Nothing, where the files took all of it; never more than the whole."""
    rig.engine.max_loras = 1
    rig.engine.hangs.add("load_lora")
    with pytest.raises(DeadlineError):
        await rig.loras.load_directory("policy", str(saved), NO_TIME_S)
    assert rig.engine.timeouts_s["load_lora"] == 0.0
    rig.engine.hangs.clear()
    rig.engine.fails["load_lora"] = DeadlineError("late")
    with pytest.raises(DeadlineError):
        await rig.loras.load_directory("policy", str(saved), 60.0)
    assert 0.0 < rig.engine.timeouts_s["load_lora"] < 60.0


async def test_load_does_not_wait_for_the_engine_after_its_time(rig: Rig, saved: Path) -> None:
    """But for a millisecond, which tells whether somebody has it. The files are gone then."""
    rig.engine.max_loras, before = 1, num_arenas()
    async with rig.pauses.undisturbed(30.0):
        with pytest.raises(DeadlineError):
            await rig.loras.load_directory("policy", str(saved), NO_TIME_S)
    assert (rig.engine.calls, num_arenas()) == ([], before)
