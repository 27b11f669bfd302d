"""The table of refused settings on what flags show by themselves, and the flags of the installed vLLM."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import vllm

from genserve.engine.vllm import launch
from genserve.engine.vllm.start import config as vllm_config
from genserve.engine.vllm.start.failure import EngineStartError
from genserve.engine.vllm.start.refusals import TABLE, check_flags
from genserve.engine.vllm.start.unreached import UNREACHED, Row
from genserve.settings.config import ServeConfig
from tests.support import models

PAGE = Path(__file__).parents[5] / "docs/refused.md"
TITLES: dict[str, Callable[[Row], bool]] = {
    "Flags that reach nothing": UNREACHED.__contains__,
    "Flags with a warning": lambda row: row not in UNREACHED and not row.refused,
    "Flags that a CPU cannot work with": lambda row: row.name.endswith("-on-cpu"),
    "Flags that pushes cannot work with": lambda row: row.refused and not row.problem,
}
LISTED = Path(__file__).with_name("engine_flags.txt")

# By row: flags that it is about, and similar ones that it is not about.
WRITTEN: dict[str, tuple[list[list[str]], list[list[str]]]] = {
    "expert-load-balancing": ([["--enable-eplb"]], [["--enable-expert-parallel"]]),
    "elastic-experts": ([["--enable-elastic-ep"]], [["--data-parallel-size=2"]]),
    "decode-context-parallelism": (
        [["--decode-context-parallel-size=2"]],
        [["--decode-context-parallel-size=1"], ["--prefill-context-parallel-size=2"]],
    ),
    "weights-offloaded-to-host": ([["--cpu-offload-gb=1"], ["--offload-backend=uva"]], [["--offload-backend=auto"]]),
    "weights-prefetched-from-host": ([["--offload-group-size=2"], ["--offload-backend=prefetch"]], []),
    "ray-workers": ([["--distributed-executor-backend=ray"]], [["--distributed-executor-backend=mp"]]),
    "ray-engines": ([["--data-parallel-backend=ray"]], [["--data-parallel-backend=mp"]]),
    "io-processors": ([["--io-processor-plugin", "prithvi"]], []),
    "prompt-embeddings": ([["--enable-prompt-embeds"]], [["--no-enable-prompt-embeds"]]),
    "media-of-requests": (
        [
            ["--allowed-local-media-path", "/data"],
            ["--allowed-media-domains", "example.org"],
            ["--media-io-kwargs", '{"video": {"num_frames": 4}}'],
            ["--interleave-mm-strings"],
            ["--enable-mm-embeds"],
        ],
        [["--limit-mm-per-prompt", '{"image": 1}']],
    ),
    "default-sampling": (
        [["--override-generation-config", '{"temperature": 0.5}'], ["--override-generation-config.top_k", "5"]],
        [["--generation-config", "vllm"]],
    ),
    "drafts-of-requests": (
        [["--per-request-spec-decode-metrics", "summary"]],
        [["--per-request-spec-decode-metrics", "none"]],
    ),
    "renderer-threads": ([["--renderer-num-workers", "4"]], [["--renderer-num-workers", "1"]]),
    "routed-experts": (
        [["--enable-return-routed-experts"], ["--aux-output-config", '{"enable_return_routed_experts": true}']],
        [["--aux-output-config", '{"enable_return_routed_experts": false}']],
    ),
    "sampling-masks": ([["--return-sampling-mask"]], []),
    "adapters-of-modalities": ([["--default-mm-loras", '{"audio": "/adapter"}']], [["--enable-lora"]]),
    "no-tokenizer": ([["--skip-tokenizer-init"]], [["--tokenizer", "/other"]]),
    "profiler": (
        [["--profiler-config", '{"profiler": "torch", "torch_profiler_dir": "/tmp"}']],
        [
            [
                "--profiler-config",
                '{"profiler": "torch", "torch_profiler_dir": "/tmp", "capture_torch_profiler": true}',
            ],
            ["--enable-layerwise-nvtx-tracing"],
        ],
    ),
    "log-of-statistics": ([["--aggregate-engine-logging"]], [["--disable-log-stats"]]),
    "servers-of-engines": (
        [["--data-parallel-multi-port-external-lb"]],
        [["--data-parallel-external-lb"], ["--data-parallel-hybrid-lb"]],
    ),
}
TAKEN_WITHOUT_A_ROW = [["--reasoning-parser", "qwen3"], ["--generation-config", "vllm"]]


@pytest.fixture(autouse=True)
def older_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asks for vLLM's older executor on Ray where one is asked for."""
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")


def parsed(*flags: str) -> argparse.Namespace:
    """As the daemon parses them."""
    return vllm_config.parser("genserve serve", "").parse_args(flags)


def row_of(name: str) -> Row:
    """A row by its name."""
    (row,) = [row for row in TABLE if row.name == name]
    return row


def test_every_row_that_flags_show_has_flags_to_be_tried_with() -> None:
    """Those that read only a configuration have one in test_refusals.py."""
    assert {row.name for row in TABLE if row.reads != "configuration"} == WRITTEN.keys()


def test_no_flag_is_no_reason_to_refuse() -> None:
    """Nor one that reaches something, however it looks."""
    for flags in [[], *TAKEN_WITHOUT_A_ROW, *(flags for _, taken in WRITTEN.values() for flags in taken)]:
        check_flags(parsed(*flags), with_openai=False)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_flag_is_refused_with_the_reason_and_what_to_do(name: str) -> None:
    """In one line, before a model is looked for, and before vLLM's own checks, which ask for more flags."""
    row = row_of(name)
    for flags in WRITTEN[name][0]:
        with pytest.raises(EngineStartError) as caught:
            check_flags(parsed(*flags), with_openai=False)
        assert str(caught.value) == row.message
        assert row.reason in row.message and row.instead in row.message and "\n" not in row.message


@pytest.mark.parametrize("name", WRITTEN)
def test_what_requests_over_http_reach_is_taken_with_the_openai_port(name: str) -> None:
    """And nothing else."""
    for flags in WRITTEN[name][0]:
        if row_of(name).by_http:
            check_flags(parsed(*flags), with_openai=True)
        else:
            with pytest.raises(EngineStartError):
                check_flags(parsed(*flags), with_openai=True)


@pytest.mark.parametrize("with_openai", [True, False])
def test_a_check_without_a_start_refuses_what_a_start_refuses(tmp_path: Path, with_openai: bool) -> None:
    """A model that vLLM runs for pooling, with an OpenAI port and without one."""
    model = ["--model", str(models.tiny_qwen3(tmp_path)), "--runner", "pooling", "--convert", "embed"]
    if with_openai:
        launch.check([*model, "--openai-port", "0"])
    else:
        with pytest.raises(EngineStartError, match=r"\[pooling\]"):
            launch.check(model)


def test_the_flags_of_the_daemon_decide_whether_there_is_http() -> None:
    """No call forgets it."""
    flags = launch.parse(["--renderer-num-workers", "2"])[1]
    launch.check_refused(ServeConfig(openai_port=0), flags)
    launch.check_refused(ServeConfig(headless=True), flags)  # the daemon on the first host says
    with pytest.raises(EngineStartError, match=r"\[renderer-threads\]"):
        launch.check_refused(ServeConfig(), flags)


@pytest.mark.parametrize(
    ("asked", "queue", "most"),
    [(ServeConfig(max_n=5), None, 5), (ServeConfig(max_n=5, max_active_requests=4), None, 4), (ServeConfig(), 3, 3)],
)
def test_largest_n_is_what_every_limit_lets_through(
    tmp_path: Path, asked: ServeConfig, queue: int | None, most: int
) -> None:
    """Of the daemon and of vLLM's queue: requests run into it, and GetServerInfo says it."""
    model = str(models.tiny_qwen3(tmp_path))
    config = vllm_config.AsyncEngineArgs(model=model, max_num_queued_reqs=queue).create_engine_config()
    limits = launch.engine_options(asked).limits
    assert vllm_config.info(config, limits.max_n).max_n == most


def listed() -> set[str]:
    """Flags that reach something, of the installed vLLM."""
    lines = [line.split() for line in LISTED.read_text().splitlines() if not line.startswith("#")]
    since = {name: tuple(map(int, first[0].split("."))) if first else (0,) for name, *first in lines}
    return {name for name, first in since.items() if first <= vllm.__version_tuple__[:2]}


def named(row: Row) -> set[str]:
    """Flags of a row that it is about whatever their value is."""
    return {flag for flag in row.flags if " " not in flag}


def test_every_flag_of_vllms_engine_is_known() -> None:
    """A new one gets a row if nothing can reach it: look for who reads it outside of vllm/entrypoints, what of that
    requests over gRPC can ask for, and what of it their answers have. Otherwise it gets a line in engine_flags.txt."""
    actions = vllm_config.parser("genserve serve", "")._actions
    long = [[each for each in action.option_strings if each.startswith("--")] for action in actions]
    have = {each[0] for each in long if each}
    rows = {flag for row in TABLE for flag in named(row)}
    assert rows & listed() == set()
    assert rows | listed() == have


def test_the_guide_lists_every_row() -> None:
    """As the row says it, in its section, and no other one."""
    sections = dict(section.split("\n", 1) for section in PAGE.read_text().split("\n## ")[1:5])
    for row in TABLE:
        title = next(title for title in sections if TITLES[title](row))
        flags = ", ".join(f"`{flag}`" for flag in row.flags)
        http = f" | {'yes' if row.by_http else 'no'}" if row in UNREACHED else ""
        assert f"| {row.name} | {flags}{http} | {row.reason} | {row.instead} |" in sections[title]
    assert sum(section.count("\n| ") for section in sections.values()) == len(TABLE) + len(TITLES)  # the heads
