"""Tables say what was measured: with its spread, and also where others are ahead."""

from pathlib import Path
from typing import Any

from bench.__main__ import MEASUREMENTS
from bench.measurements import serving
from bench.results import headline, page, plots, standings, tables
from bench.results.result import Result, medians


def result(name: str, rounds: dict[str, dict[str, list[dict[str, float]]]], **notes: Any) -> Result:
    """With these rounds, and medians of them."""
    by_key = {key: {peer: medians(each) for peer, each in by_peer.items()} for key, by_peer in rounds.items()}
    peers = list(dict.fromkeys(peer for by_peer in rounds.values() for peer in by_peer))
    return Result(name, {}, {"peers": peers, "rounds": 3}, rounds, by_key, {}, notes)


def rates(*values: float, **more: float) -> list[dict[str, float]]:
    """Rounds of a peer that generates."""
    latencies = {"ttft_p50_ms": 1.0, "ttft_p99_ms": 2.0, "inter_token_p99_ms": 3.0}
    return [{"tokens_per_s": value, **latencies, **more} for value in values]


def cells(table: str, name: str) -> list[str]:
    """Of the row that begins so."""
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_better_median_comes_first() -> None:
    """With the number of rounds in which it was ahead; what nobody serves with does not take part."""
    by_peer = {
        "in_process": rates(900, 900, 900),
        "grpc_floor": rates(800, 800, 800),
        "rust_http": rates(100, 210, 300),
        "vllm_http": rates(90, 90, 90),
        "genserve_many": rates(110, 200, 250),
    }
    table = standings.first({"generate": result("generate", {"64": by_peer})})
    assert cells(table, "tokens/s as they come, 64 at once") == [
        "`genserve_many` 200 (110–250)",
        "`rust_http` 210 (100–300)",
        "`rust_http`, in 2 of 3 rounds",
    ]


def test_the_least_is_first_where_less_is_better() -> None:
    """And a question that no result answers is left out."""
    by_peer = {
        peer: [{"paused_s": paused_s, "total_s": total_s}] * 3
        for peer, paused_s, total_s in (("memcpy", 0.001, 0.001), ("genserve", 0.02, 4.0), ("tmpfs", 0.4, 0.7))
    }
    table = standings.first({"pause": result("pause", {"smollm2": by_peer})})
    assert cells(table, "paused for an update, ms, smollm2")[2] == "genserve, in 3 of 3 rounds"
    assert cells(table, "the whole update, s, smollm2")[2] == "`tmpfs`, in 3 of 3 rounds"
    assert "tokens/s" not in table


def test_a_goal_is_met_or_not_and_has_its_spread() -> None:
    """Of the ratio within a round."""
    by_peer = {"in_process": rates(100, 100, 200), "genserve_many": rates(96, 98, 100), "genserve_generate": rates(9)}
    by_peer["genserve_generate"] *= 3
    table = standings.goals({"generate": result("generate", {"64": by_peer})})
    many, one = "`GenerateMany`, a message per step, 64 at once: tokens/s of the engine alone", "`Generate`, a message"
    assert cells(table, many) == ["at least 0.97", "0.98 (0.50–0.98)", "yes"]
    assert next(line for line in table.splitlines() if line.startswith(f"| {one}")).endswith("| no |")
    assert cells(table, "`Generate`, time to the first token, 64: the same") == [
        "at most 1.15",
        "1.00 (1.00–1.00)",
        "yes",
    ]


def test_the_page_begins_with_a_real_model_and_cpu_time() -> None:
    """Each way of updating has a row; a core holds as many tokens as the busiest process can serve in a second."""
    run = {"tokens_per_s": 100.0, "inter_token_p99_ms": 50.0, "longest_wait_s": 1.0}
    measured = result("cycle", {"8 streams, 5 s": {"no_pushes": [run], "tmpfs": [run]}})
    measured.settings["model"] = "smollm2"
    row = "| 8 streams, 5 s | genserve, no pushes | 100 (100–100) | 50 (50–50) | 1.0 (1.0–1.0) |"
    assert row in headline.real_model({"cycle": measured})
    costs = rates(1, cpu_server_us=80, cpu_busiest_us=50)
    table = headline.cpu_per_token({"generate": result("generate", {"256": {"in_process": costs, "vllm_grpc": costs}})})
    assert cells(table, "`vllm_grpc`") == ["80 (80–80)", "20,000"]
    assert "in_process" not in table
    rows = {tables.row_name(64, 50): {"in_process": rates(1), "genserve_many": rates(1, tokens_per_core_s=21_000)}}
    serving = result("serving", rows)
    assert cells(headline.tokens_per_core({"serving": serving}), "`genserve_many`") == ["21 (21–21)"]
    assert "in_process" not in headline.tokens_per_core({"serving": serving})
    assert headline.real_model({}) == headline.cpu_per_token({}) == headline.tokens_per_core({}) == ""


def test_cpu_time_is_split_into_the_engines_grpcs_and_ours() -> None:
    """By what each peer takes on top of the one below it."""
    by_peer = {
        "in_process": rates(1, cpu_client_us=0, cpu_server_us=20),
        "grpc_floor_many": rates(1, cpu_client_us=5, cpu_server_us=25),
        "genserve_many": rates(1, cpu_client_us=10, cpu_server_us=30),
    }
    table = tables.split(result("generate", {"64": by_peer}), ["64"])
    assert cells(table, "one call for all, 64") == ["20 (50%)", "10 (25%)", "10 (25%)", "40"]
    assert tables.split(result("generate", {"64": {"in_process": rates(1)}}), ["64"]) == ""


def test_other_outputs_have_tables_of_their_own() -> None:
    """Of the peers that give them."""
    measured = result(
        "generate",
        {
            "64": {"in_process": rates(10), "rust_http_tokens": rates(5)},
            "64 text": {"in_process": rates(8)},
        },
    )
    with_text = tables.generate(measured).split("tok/s with log-probabilities and text at")[1]
    assert "| `in_process` | 8 |" in with_text
    assert "rust_http_tokens" not in with_text
    only_text = result("generate", {"64 text": {"in_process": rates(8)}})
    assert tables.generate(only_text).startswith("| tok/s with log-probabilities and text at")


def test_a_training_run_has_a_row_for_each_way_and_interval() -> None:
    """With empty cells where nothing was pushed."""
    figures = {"tokens_per_s": 100.0, "inter_token_p99_ms": 50.0, "longest_wait_s": 1.0, "pushes": 3.0}
    pushed = {"share": 0.9, "lost_s_per_push": 0.5, "push_s": 2.0, "first_new_s": 1.0, "old_share": 0.4}
    measured = result("cycle", {"8 streams, 5 s": {"no_pushes": [figures], "genserve": [figures | pushed]}})
    lines = tables.cycle(measured).splitlines()
    assert lines[2].startswith("| 8 streams, 5 s | `no_pushes` | 100 (100–100) |  |")
    assert lines[3].startswith("| 8 streams, 5 s | `genserve` | 100 (100–100) | 0.90 (0.90–0.90) | 0.50 (0.50–0.50) |")


def test_every_measurement_has_a_table_and_curves(tmp_path: Path) -> None:
    """A training run's are of each number of streams."""
    assert set(MEASUREMENTS) == set(page.TABLES) == set(plots.PANELS)
    figures = {"share": 0.9, "lost_s_per_push": 0.5, "first_new_s": 1.0, "longest_wait_s": 1.0}
    rounds = {f"{streams} streams, {s} s": {"genserve": [figures]} for streams in (8, 64) for s in (5, 10)}
    measured = result("cycle", rounds)
    measured.settings["concurrency"] = [8, 64]
    drawn = plots.PANELS["cycle"](measured)
    assert [curves for _, _, _, curves in drawn][:2] == [
        {"genserve": ([5.0, 10.0], [0.9, 0.9])},
        {"genserve": ([5.0, 10.0], [0.5, 0.5])},
    ]
    assert len(drawn) == 8
    assert plots.draw(measured, tmp_path).stat().st_size > 1000


def test_servers_are_compared_by_what_one_core_passes_on(tmp_path: Path) -> None:
    """Each beside vLLM's OpenAI server in Python, with the lowest and the highest ratio of a round."""
    row, others = tables.row_name(64, tables.PACE_MS), {"tokens_per_message": 1.0}
    costs = {f"cpu_{each}_us": 10.0 for each in ("server", "busiest", "client")}
    rounds = {
        row: {
            "vllm_http": [{"tokens_per_s": 1.0, **others, **costs, "tokens_per_core_s": 100_000.0}] * 2,
            "genserve_many": [
                {"tokens_per_s": 1.0, **others, **costs, "tokens_per_core_s": rate} for rate in (200_000.0, 300_000.0)
            ],
        }
    }
    measured = result("serving", rounds)
    measured.ratios[row] = serving.per_core_ratios(measured.medians[row])
    table = page.TABLES["serving"][1](measured)
    assert cells(table, "`vllm_http`")[0] == "100 (1)"
    assert cells(table, "`genserve_many`")[:2] == ["250 (2.50; 2.00–3.00)", "1 (1–1)"]
    (asked,) = (line for line in standings.first({"serving": measured}).splitlines() if row in line)
    assert "`genserve_many` 250 (200–300)" in asked
    assert plots.draw(measured, tmp_path).stat().st_size > 1000


def test_a_pause_is_shown_with_the_whole_update() -> None:
    """Also where that is longer than the naive ways'."""
    by_peer = {
        peer: [{"paused_s": paused_s, "total_s": total_s}]
        for peer, paused_s, total_s in (("memcpy", 0.01, 0.01), ("genserve", 0.02, 4.0), ("tmpfs", 0.4, 0.7))
    }
    measured = result("pause", {"smollm2": by_peer}, bytes={"smollm2": 269_000_000}, ratio_to="memcpy")
    table = tables.pause(measured)
    assert "| `genserve` | 20.0 (2.00; 2.00–2.00) |" in table
    assert "| `genserve` | 4,000 (4,000–4,000) |" in table
