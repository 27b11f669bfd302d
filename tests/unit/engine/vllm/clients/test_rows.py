"""What clients of an engine tell each other, and the load, from what vLLM reports when it steps."""

from types import SimpleNamespace

from vllm.v1.engine.admission_control import SharedAdmissionStats

from genserve.engine.vllm.clients.interruption import Heard, Watch
from genserve.engine.vllm.clients.rows import ClientRow, ClientRows, LoadMeter
from genserve.memory.words import SharedWords


def step(waiting: int, kv_usage: float, queries: int, hits: int, *, skipped: int = 1) -> SimpleNamespace:
    """A scheduler's statistics."""
    return SimpleNamespace(
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=skipped,
        kv_cache_usage=kv_usage,
        prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits),
    )


def test_a_client_knows_what_the_others_have_admitted() -> None:
    """Its own sequences are not among them, nor those of a client that has died."""
    rows = ClientRows.create(3, 1)
    tallies = [rows.tally(index) for index in range(3)]
    for number, tally in enumerate(tallies):
        tally.publish(10**number, number)
    assert [tally.num_elsewhere for tally in tallies] == [110, 101, 11]
    assert [rows.row(index).num_requests for index in range(3)] == [0, 1, 2]
    rows.vacate(1)
    assert [tally.num_elsewhere for tally in tallies] == [100, 101, 1]


def test_a_client_that_is_cleared_has_counted_nothing() -> None:
    """The others stay as they are."""
    rows = ClientRows.create(2, 2)
    for index in range(2):
        rows.tally(index).publish(3, 2)
        rows.row(index).served(0, 7)
        rows.row(index).record(step(2, 0.2, 10, 1), SimpleNamespace(num_generation_tokens=5), engine_idx=1)
    rows.row(1).clear()
    untouched = ClientRows.create(1, 2).row(0)

    def told(row: ClientRow) -> tuple[object, ...]:
        return row.num_requests, row.served_tokens, row.stats()

    assert told(rows.row(1)) == told(untouched) != told(rows.row(0))
    assert rows.row(1).stats().num_recent_tokens == 0 < rows.row(0).stats().num_recent_tokens


async def test_each_client_is_told_of_the_steps_of_its_own_sequences() -> None:
    """Those that wait for their first output after a push: vLLM says after how long it came."""
    gained = SimpleNamespace(num_generation_tokens=1, inter_token_latencies_iter=[2.5])
    row = ClientRows.create(1, 1).row(0)
    states = {"a": 1.0}
    watch = row.interruptions.begin(Watch(states, lambda last_output_s: Heard(last_output_s, 2)))
    row.record(None, None)
    assert watch.waiting
    states["a"] = 3.5
    row.record(None, gained)
    assert await watch.longest_wait_s(patience_s=0.0) == 2.5


def test_a_client_hears_of_each_step_that_had_output() -> None:
    """A sequence may have ended with it."""
    row = ClientRows.create(1, 1).row(0)
    heard: list[int] = []
    row.after_step = lambda: heard.append(1)
    row.record(step(1, 0.0, 0, 0), None)
    assert heard == []
    row.record(None, SimpleNamespace(num_generation_tokens=0, inter_token_latencies_iter=[]))
    assert heard == [1]


def test_the_load_is_that_of_the_last_step_whichever_client_was_told() -> None:
    """vLLM tells one client of each step; tokens and cache hits add up, and so do steps."""
    now = 100.0
    rows = ClientRows(SharedWords.create(1000, "test"), 3, 2, lambda: now)
    meter = LoadMeter(rows.row(0), rows.rows(but=0), range(20))
    rows.row(0).record(step(2, 0.2, 10, 1), SimpleNamespace(num_generation_tokens=5))
    rows.row(1).record(step(4, 0.4, 10, 2), SimpleNamespace(num_generation_tokens=10))
    rows.row(2).record(None, SimpleNamespace(num_generation_tokens=35))
    rows.row(2).record(step(6, 0.6, 20, 7), None, engine_idx=1)
    load = meter.load()
    assert (load.waiting, load.running, load.kv_usage) == (12, 8, 0.5)
    assert (load.tokens_per_second, load.prefix_cache_hit_rate) == (10.0, 0.25)
    assert meter.steps() == 1
    rows.row(0).record(step(0, 0.2, 0, 0), None)
    assert meter.load().waiting == 8
    assert meter.steps() == 1, "the engine with the fewest"
    now = 104.0
    rows.row(1).record(None, SimpleNamespace(num_generation_tokens=15))
    assert meter.load().tokens_per_second == 13.0
    now = 106.0
    assert meter.load().tokens_per_second == 3.0
    now = 200.0
    assert meter.load().tokens_per_second == 0.0


def test_load_counts_the_sequences_of_other_clients() -> None:
    """The caller knows its own ones itself, from vLLM."""
    rows = ClientRows.create(3, 1)
    for index, num_sequences in enumerate((7, 2, 3)):
        rows.tally(index).publish(num_sequences, 1)
    assert LoadMeter(rows.row(0), rows.rows(but=0), range(1)).load().running == 6


def test_vllm_counts_unfinished_requests_of_all_clients_in_them() -> None:
    """For --max-num-queued-reqs. Those of a client that has died do not count."""
    rows = ClientRows.create(3, 2)
    stats = [SharedAdmissionStats({"mp_admission_counters": rows.counters}, 3, index) for index in range(3)]
    for number, each in enumerate(stats):
        each.set_num_requests(10**number)
        rows.tally(number).publish(5, 5)
    assert stats[0].get_num_requests() == 111
    rows.vacate(1)
    assert stats[2].get_num_requests() == 101
    assert rows.row(2).num_requests == 5


def test_tokens_count_by_versions_behind_even_of_a_dead_client() -> None:
    """Of all clients together. What counts the seconds before is not touched."""
    rows = ClientRows.create(2, 1)
    meter = LoadMeter(rows.row(0), rows.rows(but=0), range(3))
    rows.tally(0).served(0, 5)
    rows.tally(1).served(2, 7)
    rows.tally(1).served(40, 1)
    rows.vacate(1)
    assert meter.served_tokens() == [5, 0, 7, 0, 0, 0, 0, 1]
    assert (meter.load().tokens_per_second, meter.steps()) == (0.0, 0)


def test_what_was_reported_last_is_bounded_by_what_is_known_to_be_active() -> None:
    """vLLM reports nothing more once it is idle."""
    rows = ClientRows.create(1, 1)
    unfinished = [*range(8)]
    meter = LoadMeter(rows.row(0), rows.rows(but=0), unfinished)
    rows.row(0).record(step(3, 0.5, 10, 5, skipped=0), None)
    assert (meter.load().running, meter.load().waiting, meter.load().kv_usage) == (5, 3, 0.5)
    unfinished.clear()
    assert (meter.load().running, meter.load().waiting, meter.load().kv_usage) == (0, 0, 0.0)
    assert meter.load().prefix_cache_hit_rate == 0.5


def test_the_rate_forgets_what_is_older_than_its_window() -> None:
    """Tokens per second are those of the last five seconds, over all engines."""
    now = 0.0
    rows = ClientRows(SharedWords.create(1000, "test"), 1, 2, lambda: now)
    meter = LoadMeter(rows.row(0), rows.rows(but=0), range(1))
    for engine in (0, 1):
        rows.row(0).record(None, SimpleNamespace(num_generation_tokens=50), engine_idx=engine)
    now = 4.0
    assert meter.load().tokens_per_second == 20.0
    now = 6.0
    assert meter.load().tokens_per_second == 0.0


def test_requests_that_the_scheduler_has_skipped_wait_too() -> None:
    """For a constraint that is compiled, or for a LoRA adapter: vLLM counts them apart."""
    rows = ClientRows.create(1, 1)
    meter = LoadMeter(rows.row(0), rows.rows(but=0), range(8))
    rows.row(0).record(step(3, 0.5, 10, 5, skipped=2), None)
    assert (meter.load().running, meter.load().waiting) == (3, 5)
