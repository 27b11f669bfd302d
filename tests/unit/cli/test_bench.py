"""`genserve bench` against a real server that answers by a script: what it counts, prints and leaves behind.

What is measured against the real push and pause code is in tests/rpc/test_bench.py.
"""

import asyncio
import json
import signal
from typing import Any

import pytest
from google.rpc import code_pb2

from genserve.cli import main
from genserve.cli.bench import GenerationFigures, StreamTimes, percentile, table
from tests.support.commands import start
from tests.support.scripted_services import ScriptedDaemon, refuse


async def bench(daemon: ScriptedDaemon, *arguments: str) -> int:
    """Runs `genserve bench` in a thread of its own."""
    return await asyncio.to_thread(main, ["bench", *arguments, "--target", daemon.target])


async def test_generate_prints_a_row_for_each_concurrency(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns carry their unit; each concurrency has four requests a slot."""
    assert await bench(daemon, "generate", "--concurrency", "1,3") == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0].strip() == "concurrency"
    assert "tokens per s" in header
    assert "ttft p99 ms" in header
    assert [row.split()[:2] for row in rows] == [["1", "4"], ["3", "12"]]


async def test_generate_asks_for_what_its_flags_say(daemon: ScriptedDaemon) -> None:
    """Greedy, of a fixed length, tokens alone; every prompt another one."""
    assert await bench(daemon, "generate", "--concurrency", "2", "--requests", "3", "--max-tokens", "7") == 0
    assert len(daemon.requests) == 1 + 3  # one warms up
    for request in daemon.requests:
        assert request.stop.max_tokens == 7
        assert request.stop.ignore_eos
        assert request.sampling.temperature == 0
        assert not request.output.text
        assert len(request.token_ids.ids) == 5
        assert max(request.token_ids.ids) < 512
    assert len({tuple(request.token_ids.ids) for request in daemon.requests}) == 4


async def test_generate_asks_for_more_than_tokens_if_told(daemon: ScriptedDaemon) -> None:
    """Log-probabilities and text cost something: who needs them measures with them."""
    flags = ["--concurrency", "1", "--requests", "1", "--logprobs", "0", "--text"]
    assert await bench(daemon, "generate", *flags) == 0
    for request in daemon.requests:
        assert request.output.text
        assert request.output.HasField("logprobs") and request.output.logprobs == 0


async def test_generate_as_json_is_one_line(daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    """For programs."""
    assert await bench(daemon, "generate", "--concurrency", "2", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    (row,) = json.loads(line)["rows"]
    assert row["requests"] == 8
    assert row["tokens_per_s"] > 0
    assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]


async def test_generate_says_when_nothing_was_generated(
    daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """A figure of nothing would be a lie."""
    daemon.words = []
    assert await bench(daemon, "generate") == 1
    assert "without a token" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "num_lines"), [([], 2), (["--json"], 1)])
async def test_what_was_measured_before_an_error_is_printed(
    flags: list[str], num_lines: int, daemon: ScriptedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a queue that the larger concurrency fills."""

    async def fail(context: Any) -> None:
        if len(daemon.requests) > 1 + 4:  # one warms up, and one slot makes four
            await refuse(context, code_pb2.RESOURCE_EXHAUSTED, "QUEUE_FULL", "full")

    daemon.fail = fail
    assert await bench(daemon, "generate", "--concurrency", "1,3", *flags) == 1
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == num_lines
    assert output.err == "genserve: QUEUE_FULL: full\n"


@pytest.mark.slow
async def test_an_interrupt_ends_the_requests_without_a_traceback(daemon: ScriptedDaemon) -> None:
    """Exit 130."""
    daemon.hangs_after = 2
    process = await start(daemon.target, "bench", "generate")
    await asyncio.wait_for(daemon.hanging.wait(), 60)
    process.send_signal(signal.SIGINT)
    assert await process.communicate() == (b"", b"")
    assert process.returncode == 130
    await asyncio.wait_for(daemon.cancelled.wait(), 30)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["generate", "--concurrency", "1,,4"],
        ["generate", "--concurrency", "0"],
        ["generate", "--max-tokens", "-1"],
        ["push"],
        ["push", "x", "--streams", "two"],
        ["pause", "--rounds", "0"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """argparse's way."""
    with pytest.raises(SystemExit) as exited:
        main(["bench", *arguments])
    assert exited.value.code == 2
    assert "usage: genserve bench" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_a_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    """The nearest rank, without interpolation."""
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_a_percentile_of_nothing_is_0() -> None:
    """Answers of one token have no waits between tokens."""
    assert percentile([], 0.99) == 0.0


def test_figures_of_streams() -> None:
    """Tokens over the time from the first request to the last token; waits are between messages of the same stream."""
    streams = [StreamTimes(10.0, [10.5, 11.0], 2), StreamTimes(10.2, [10.4, 12.0], 6)]
    figures = GenerationFigures.of(2, streams, client_cpu_s=0.004)
    assert figures.client_cpu_us_per_token == pytest.approx(500.0)
    assert figures.tokens_per_s == pytest.approx(4.0)
    assert figures.ttft_p50_ms == pytest.approx(200.0)
    assert figures.ttft_p99_ms == pytest.approx(500.0)
    assert figures.inter_token_p50_ms == pytest.approx(500.0)
    assert figures.inter_token_p99_ms == pytest.approx(1600.0)


def test_a_table_has_aligned_columns() -> None:
    """Four digits are enough to read."""
    rows: list[dict[str, Any]] = [{"n": 1, "per_s": 12345.6}, {"n": 100, "per_s": 0.012345}]
    assert table(rows).splitlines() == ["  n    per s", "  1    12346", "100  0.01235"]
