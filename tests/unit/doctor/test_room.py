"""What fits is computed from sizes and flags."""

import argparse

import pytest

from genserve.doctor.room import (
    KV_TOKENS,
    PROCESS_BYTES,
    TYPICAL,
    Memory,
    ModelSize,
    fits,
    largest_beside,
    own_verdict,
    room,
    room_verdicts,
    typical,
)
from genserve.doctor.serve_flags import ServeFlags
from genserve.doctor.verdict import Level
from genserve.errors import InvalidFieldError
from genserve.settings.config import CPU_KV_CACHE_BYTES
from genserve.worker.contract.placement import ACTIVATION_BYTES, HOST_FACTOR, WorkerFacts, place
from tests.support.refusals import refuses

GB = 10**9
H100 = Memory(80 * GB, 1000 * GB)
MODEL = ModelSize("m", weight_bytes=16 * GB, largest_bytes=GB, kv_bytes_per_token=100_000)


def flags(text: str = "") -> ServeFlags:
    return ServeFlags.parse(text.split())


def needed_beside(text: str = "") -> float:
    """As the flags say, of each device."""
    given = flags(text)
    kv_bytes = KV_TOKENS * 100_000 / given.num_ranks
    bounce = GB / given.tensor_parallel_size
    return 2 * 16 * GB / given.num_ranks + bounce + ACTIVATION_BYTES + kv_bytes


@pytest.mark.parametrize("text", ["", "--tensor-parallel-size 2", "-pp 2"])
def test_a_device_holds_two_models_the_largest_tensor_and_a_least_kv_cache(text: str) -> None:
    """Within --gpu-memory-utilization, and not a byte beyond it."""
    exactly = needed_beside(text) / 0.5
    given = flags(f"{text} --gpu-memory-utilization 0.5")
    assert fits("beside", MODEL, Memory(int(exactly) + 1, 1000 * GB), given)
    assert not fits("beside", MODEL, Memory(int(exactly) - 1, 1000 * GB), given)
    assert room(MODEL, H100, flags(text)).needed_bytes == pytest.approx(needed_beside(text))


def test_what_would_leave_little_for_keys_and_values_is_built_on_the_host() -> None:
    """As the daemon's `auto` decides, by the same rule."""
    left_bytes = 3 * (16 * GB + GB) / 2  # of which a third stays
    enough = (16 * GB + left_bytes) / 0.92
    assert room(MODEL, Memory(int(enough) + 10, 1000 * GB), flags()).way == "beside"
    assert room(MODEL, Memory(int(enough) - 10, 1000 * GB), flags()).way == "host"


@pytest.mark.parametrize("device_gb", range(24, 100, 5))
def test_a_daemon_decides_the_same(device_gb: int) -> None:
    """From what it finds when the model is loaded."""
    left = int(0.92 * device_gb * GB) - 16 * GB
    found = room(MODEL, Memory(device_gb * GB, 1000 * GB), flags())
    assert found.way == place("auto", WorkerFacts(16 * GB, GB, left, 1000 * GB)).way


def test_the_flags_that_say_how_large_the_kv_cache_is_are_heeded() -> None:
    """Per rank, or by the longest sequence."""
    plain = room(MODEL, H100, flags()).needed_bytes
    longer = room(MODEL, H100, flags(f"--max-model-len {2 * KV_TOKENS}")).needed_bytes
    assert longer - plain == pytest.approx(KV_TOKENS * 100_000)
    given = room(MODEL, H100, flags("--kv-cache-memory-bytes 2g")).needed_bytes
    assert given - plain == pytest.approx(2 * GB - KV_TOKENS * 100_000)


def test_what_does_not_fit_beside_is_staged_on_the_host_or_loaded_in_place() -> None:
    """By what the host has; without room for the model itself it cannot be served."""
    large = ModelSize("l", 50 * GB, GB, 100_000)
    assert room(large, Memory(80 * GB, 200 * GB), flags()).way == "host"
    assert room(large, Memory(80 * GB, 120 * GB), flags()).way == "inplace"
    assert room(large, Memory(80 * GB, 90 * GB), flags()).way == ""
    assert room(large, Memory(40 * GB, 500 * GB), flags()).way == ""
    assert not fits("inplace", large, Memory(40 * GB, 500 * GB), flags())


def test_what_is_lacking_is_named() -> None:
    """Seen on an H200: "125.9 GiB are needed, 128.6 are there", because it was the host that had too little."""
    large = ModelSize("l", 50 * GB, GB, 100_000)
    by_host = own_verdict(room(large, Memory(80 * GB, 90 * GB), flags()), Memory(80 * GB, 90 * GB))
    assert "of the host's memory" in by_host.finding and "Add host memory" in by_host.advice
    by_device = own_verdict(room(large, Memory(40 * GB, 500 * GB), flags()), Memory(40 * GB, 500 * GB))
    assert "host" not in by_device.finding and "--tensor-parallel-size" in by_device.advice
    for verdict in (by_host, by_device):
        assert verdict.figures["needed_bytes"] > verdict.figures["budget_bytes"]


def test_on_a_cpu_four_copies_lie_in_host_memory() -> None:
    """The live model, the served bytes, those that arrive, and what is prepared; in place without the last."""
    shadow = HOST_FACTOR * 16 * GB
    beside = int(3 * 16 * GB + shadow) + CPU_KV_CACHE_BYTES + PROCESS_BYTES
    assert room(MODEL, Memory(None, beside), flags()).way == "beside"
    assert room(MODEL, Memory(None, beside - 1), flags()).way == "inplace"
    assert room(MODEL, Memory(None, beside - int(shadow)), flags()).way == ""
    twice = beside + int(16 * GB + shadow) + CPU_KV_CACHE_BYTES
    assert [fits("beside", MODEL, Memory(None, each), flags("-dp 2")) for each in (twice, twice - 1)] == [True, False]
    with pytest.raises(KeyError):  # no answer for another way
        fits("host", MODEL, Memory(None, beside), flags())
    assert fits("beside", MODEL, Memory(None, beside - CPU_KV_CACHE_BYTES + 2**20), flags("--kv-cache-memory-bytes 1M"))


def test_the_largest_model_is_the_largest_that_fits() -> None:
    """A little more does not."""
    parameters = largest_beside(H100, flags())
    assert fits("beside", typical(0.999 * parameters), H100, flags())
    assert not fits("beside", typical(1.001 * parameters), H100, flags())
    assert 12e9 < parameters < 18e9
    assert largest_beside(H100, flags("-tp 8")) > 6 * parameters
    assert largest_beside(Memory(4 * GB, 10 * GB), flags()) < 0.5e9


def test_a_model_between_two_usual_sizes_lies_between_them() -> None:
    """The usual ones are themselves."""
    for model in TYPICAL:
        same = typical(model.weight_bytes / 2)
        assert (same.weight_bytes, same.largest_bytes) == (model.weight_bytes, pytest.approx(model.largest_bytes))
        assert same.kv_bytes_per_token == pytest.approx(model.kv_bytes_per_token)
    sizes = [typical(parameters * 1e9) for parameters in (1, 4, 8.03, 11, 14.8, 20, 50, 70.6, 400)]
    assert [each.weight_bytes for each in sizes] == sorted(each.weight_bytes for each in sizes)
    assert [each.kv_bytes_per_token for each in sizes] == sorted(each.kv_bytes_per_token for each in sizes)


def test_every_usual_size_is_reported_with_its_way() -> None:
    """And the flags that the largest one was computed for."""
    verdicts = {each.check: each for each in room_verdicts(H100, flags("-tp 2 --gpu-memory-utilization 0.85"), None)}
    assert list(verdicts) == ["largest beside", *(f"{model.name} in bf16" for model in TYPICAL)]
    assert "at --gpu-memory-utilization 0.85, 2 ranks" in verdicts["largest beside"].finding
    ways = [verdicts[f"{model.name} in bf16"].figures["way"] for model in TYPICAL]
    assert ways == ["beside", "beside", "host", ""]


def test_a_machine_that_no_useful_model_fits_is_warned_of() -> None:
    """With what to do."""
    largest = next(iter(room_verdicts(Memory(4 * GB, 10 * GB), flags(), None)))
    assert (largest.level, largest.advice != "") == (Level.WARN, True)


def test_a_model_of_the_users_own_is_judged() -> None:
    """OK beside, WARN when it pauses longer, FAIL when it cannot be served."""
    by_weights = [own_verdict(room(ModelSize("m", w * GB, GB, 1), H100, flags()), H100) for w in (16, 50, 90)]
    assert [each.level for each in by_weights] == [Level.OK, Level.WARN, Level.FAIL]
    assert [each.advice != "" for each in by_weights] == [False, True, True]


@pytest.mark.parametrize(
    "given",
    [
        ["x"],
        ["-1"],
        ["--tensor-parallel-size", "0"],
        ["--tensor-parallel-size"],
        ["--gpu_memory_utilization=nan"],
        ["--max-model-len", "many"],
        ["--model", "x"],
        ["--weight_update=beside"],
        ["--kv-cache-memory-bytes", "9" * 30],
    ],
)
def test_flags_that_cannot_be_are_refused(given: list[str]) -> None:
    """Before anything is started."""
    with refuses(InvalidFieldError, field="SERVE_FLAGS"):
        ServeFlags.parse(given)


def test_flags_are_read_as_vllm_reads_them() -> None:
    """Underscores, short forms and sizes; what is not known is passed on."""
    read = ServeFlags.parse(
        ["--tensor_parallel_size=2", "-pp", "3", "-dp", "2", "--max-model-len", "8K", "--enable-lora"]
    )
    assert (read.tensor_parallel_size, read.pipeline_parallel_size, read.num_ranks) == (2, 3, 6)
    assert (read.num_workers, read.max_model_len) == (12, 8192)
    assert read.passed_on[-1] == "--enable-lora"
    assert ServeFlags.parse(["--max-model-len", "auto"]).max_model_len is None


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (["--tensor-parallel", "2"], "tensor_parallel_size", 2),
        (["--gpu_memory_util=0.5"], "gpu_memory_utilization", 0.5),
        (["--kv-cache-memory", "1M"], "kv_cache_bytes", 1 << 20),
        (["--max-active-requests", "4"], "max_requests", 4),
        (["--max-num-queued-r", "3", "--max-active-r", "4"], "max_requests", 3),
    ],
)
def test_a_flag_may_be_cut_short(given: list[str], name: str, value: float) -> None:
    """As vLLM's parser has it."""
    assert getattr(ServeFlags.parse(given), name) == value


@pytest.mark.parametrize(
    ("given", "name"), [("--weight-upd=host", "weight-update"), ("--hos", "host"), ("--config", "config")]
)
def test_what_is_the_doctors_to_set_is_so_however_it_is_written(given: str, name: str) -> None:
    """It would go to another port, or be told of a way that was not served."""
    with refuses(InvalidFieldError, field="SERVE_FLAGS", says=f"--{name}"):
        ServeFlags.parse([given, "x"])


def test_flags_that_the_doctor_reads_are_the_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no whole flag of the daemon is another one cut short: the doctor would take it for that one."""
    from genserve.engine.vllm.start import config as vllm_config
    from genserve.settings.config import ServeConfig

    known = vllm_config.parser("genserve serve", "")
    ServeConfig.add_flags(known)
    theirs, read = set(known._option_string_actions), set[str]()

    def parse_known_args(self: argparse.ArgumentParser, given: list[str]) -> tuple[argparse.Namespace, list[str]]:
        read.update(self._option_string_actions)
        return parse(self, given)

    parse = argparse.ArgumentParser.parse_known_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)
    ServeFlags.parse(["--x"])
    assert len(read) > 10
    assert read <= theirs
    assert [flag for flag in theirs - read if any(each.startswith(flag) for each in read)] == []
