"""Who is first, and which goals are reached: computed from all results, so that no sentence outlives its figures."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from bench.results.result import Result, markdown, value
from bench.results.tables import CEILING, PACE_MS, SHOWN, ceiling_of, row_name

_YARDSTICKS = ("in_process", "grpc_floor", "no_pushes", "memcpy")
"""Beginnings of the names of what nobody serves with."""


@dataclass(frozen=True, slots=True)
class Question:
    """A figure in which peers are compared: those that `is_asked` says."""

    text: str
    result: str
    key: str
    figure: str
    is_asked: Callable[[str], bool]
    least_is_best: bool = False
    scale: float = 1.0
    digits: int = 0


def _streams(peer: str) -> bool:
    return not peer.endswith("_final")


def _one_call(peer: str) -> bool:
    return _streams(peer) and "_many" not in peer


def _final(peer: str) -> bool:
    return peer.endswith("_final")


def _recomputes(peer: str) -> bool:
    """As the naive ways do. To keep the keys and values of the old weights is another thing, and cheaper."""
    return "reuse" not in peer


_OF_A_RUN = (
    ("generation lost a push, s", "lost_s_per_push", 2),
    ("to the first token of a new version, s", "first_new_s", 2),
    ("longest wait for a token, s", "longest_wait_s", 1),
)
"""What a training run feels of pushes: its name, the figure, and its digits."""


def _questions() -> Iterator[Question]:
    for key in SHOWN:
        yield Question(f"tokens/s as they come, {key} at once", "generate", key, "tokens_per_s", _streams)
    key = SHOWN[-1]
    yield Question(f"the same, one call for each request, {key}", "generate", key, "tokens_per_s", _one_call)
    yield Question(f"the same, one message with all tokens, {key}", "generate", key, "tokens_per_s", _final)
    yield Question(f"the same, with log-probabilities, {key}", "generate", f"{key} logprobs", "tokens_per_s", _streams)
    yield Question(f"the same, with text too, {key}", "generate", f"{key} text", "tokens_per_s", _streams)
    yield Question(f"first token p50, ms, {key}", "generate", key, "ttft_p50_ms", _streams, least_is_best=True)
    yield Question(
        f"the server's CPU µs a token, {key}", "generate", key, "cpu_server_us", _streams, least_is_best=True
    )
    for key in SHOWN:
        row = row_name(int(key), PACE_MS)
        text = f"thousand tokens/s of one core of the server, {row}"
        yield Question(text, "serving", row, "tokens_per_core_s", _streams, scale=1e-3)
    yield Question("paused for an update, ms, smollm2", "pause", "smollm2", "paused_s", _recomputes, True, 1000)
    yield Question("the whole update, s, smollm2", "pause", "smollm2", "total_s", _recomputes, True, 1, 2)
    yield Question("the whole update, s, 1 GB", "pause", "1000", "total_s", _recomputes, True, 1, 2)
    for streams in (8, 64):
        for interval_s in (5, 10, 30):
            key = f"{streams} streams, {interval_s} s"
            run = f"{streams} streams, a push every {interval_s} s"
            for text, figure, digits in _OF_A_RUN:
                yield Question(f"{text}, {run}", "cycle", key, figure, _recomputes, True, 1, digits)


def first(results: Mapping[str, Result]) -> str:
    """Who is first in what a user can choose, and genserve's best; a question whose figures are missing is left out."""
    rows = []
    for question in _questions():
        result = results.get(question.result)
        by_peer = {} if result is None else result.medians.get(question.key, {})
        found = {
            peer: figures[question.figure]
            for peer, figures in by_peer.items()
            if question.figure in figures and question.is_asked(peer) and not peer.startswith(_YARDSTICKS)
        }
        others = {peer: each for peer, each in found.items() if not peer.startswith("genserve")}
        ours = {peer: each for peer, each in found.items() if peer.startswith("genserve")}
        if result is None or not others or not ours:
            continue
        best = min if question.least_is_best else max
        best_own, best_other = (best(each, key=each.__getitem__) for each in (ours, others))
        rows.append(
            [
                question.text,
                *(f"`{peer}` {_value(result, question, peer)}" for peer in (best_own, best_other)),
                _winner(result, question, best_own, best_other),
            ]
        )
    header = ["", "genserve's best (lowest–highest)", "the best of the others", "better median (ahead in rounds)"]
    return markdown(header, rows)


def _value(result: Result, question: Question, peer: str) -> str:
    return value(result, question.key, peer, question.figure, scale=question.scale, digits=question.digits)


def _winner(result: Result, question: Question, own: str, other: str) -> str:
    """The one with the better median, and in how many rounds it was ahead of the other."""
    medians, rounds = result.medians[question.key], result.rounds[question.key]
    sign = -1 if question.least_is_best else 1
    own_wins = sign * medians[own][question.figure] >= sign * medians[other][question.figure]
    both = [
        sign * (mine[question.figure] - theirs[question.figure])
        for mine, theirs in zip(rounds[own], rounds[other], strict=True)
        if question.figure in mine and question.figure in theirs
    ]
    num_ahead = sum(each > 0 if own_wins else each < 0 for each in both)
    return f"{'genserve' if own_wins else f'`{other}`'}, in {num_ahead} of {len(both)} rounds"


@dataclass(frozen=True, slots=True)
class Goal:
    """A ratio that a peer shall have to another one."""

    text: str
    result: str
    key: str
    peer: str
    baseline: str
    figure: str
    limit: float
    is_most: bool = False


GOALS = (
    Goal("`GenerateMany`, a message per step, 64 at once: tokens/s of the engine alone", "generate", "64",
         "genserve_many", CEILING, "tokens_per_s", 0.97),
    Goal("`Generate`, a message per token, 64: the same", "generate", "64",
         "genserve_generate", CEILING, "tokens_per_s", 0.80),
    Goal("`Generate`, one message with all tokens, 64: the same", "generate", "64",
         "genserve_generate_final", ceiling_of("genserve_generate_final"), "tokens_per_s", 0.97),
    Goal("`GenerateMany`, one message with all tokens, 64: the same", "generate", "64",
         "genserve_many_final", ceiling_of("genserve_many_final"), "tokens_per_s", 1.0),
    Goal("`GenerateMany`, time to the first token, 64: times that of the engine alone", "generate", "64",
         "genserve_many", CEILING, "ttft_p50_ms", 1.15, is_most=True),
    Goal("`Generate`, time to the first token, 64: the same", "generate", "64",
         "genserve_generate", CEILING, "ttft_p50_ms", 1.15, is_most=True),
    *(
        Goal(f"`GenerateMany` with text and log-probabilities, {key}: tokens/s of the engine alone", "generate",
             f"{key} text", "genserve_many", CEILING, "tokens_per_s", 0.9)
        for key in SHOWN
    ),
    *(
        Goal(f"`GenerateMany`, {key}: tokens/s of vLLM's Rust front end on its fastest route", "generate", key,
             "genserve_many", "rust_http_tokens", "tokens_per_s", 1.0)
        for key in SHOWN
    ),
    Goal("`Generate`, 256: tokens/s of vLLM's gRPC server", "generate", "256",
         "genserve_generate", "vllm_grpc", "tokens_per_s", 1.0),
    Goal("`Generate`, 256: tokens/s of vLLM's OpenAI server in Python", "generate", "256",
         "genserve_generate", "vllm_http", "tokens_per_s", 1.0),
    Goal("`Generate`, first token p99, 256: times that of vLLM's gRPC server", "generate", "256",
         "genserve_generate", "vllm_grpc", "ttft_p99_ms", 1.0, is_most=True),
    Goal("`Generate` with 3 front ends, 256: CPU a token of the busiest process, of that of one", "generate", "256",
         "genserve_3_frontends", "genserve_generate", "cpu_busiest_us", 0.34, is_most=True),
    *(
        Goal(f"a whole update of {name}, nothing running: time of a file in shared memory and a reload", "push", size,
             "update_genserve", "update_tmpfs", "seconds", 0.8, is_most=True)
        for name, size in (("smollm2", "smollm2"), ("1 GB", "1000"))
    ),
    Goal("a whole update of smollm2, streams running: the same", "pause", "smollm2",
         "genserve", "tmpfs", "total_s", 1.5, is_most=True),
    Goal("a whole update of smollm2 with `prepare_mode=\"paused\"`, streams running: the same", "pause", "smollm2",
         "genserve_hint", "tmpfs", "total_s", 1.0, is_most=True),
    Goal("a training run, 8 streams, a push every 10 s: tokens of no pushes", "cycle", "8 streams, 10 s",
         "genserve", "no_pushes", "tokens_per_s", 0.97),
    Goal("to the first token of the new version: times that of a file and a reload", "cycle", "8 streams, 10 s",
         "genserve", "tmpfs", "first_new_s", 1.0, is_most=True),
    Goal("a push of 1 GB over one stream: GB/s of a raw socket", "push", "1000",
         "genserve", "raw_tcp", "gb_per_s", 0.7),
    Goal("over four streams, where there are cores for them: the same", "push", "1000",
         "genserve_4_streams", "raw_tcp", "gb_per_s", 1.0),
    Goal("through shared memory: GB/s of memcpy", "push", "1000",
         "genserve_shared_memory", "memcpy", "gb_per_s", 0.5),
    Goal("the pause of a push of 1 GB: times memcpy, and the running step", "pause", "1000",
         "genserve", "memcpy", "paused_s", 1.5, is_most=True),
    Goal("inter-token p50 while a version is prepared, smollm2: times the undisturbed one", "interference", "smollm2",
         "preparing", "undisturbed", "inter_token_p50_ms", 1.3, is_most=True),
    Goal("inter-token p99 while a version is prepared: the same", "interference", "smollm2",
         "preparing", "undisturbed", "inter_token_p99_ms", 1.3, is_most=True),
    Goal("inter-token p99 while a push arrives: the same", "interference", "smollm2",
         "receiving", "undisturbed", "inter_token_p99_ms", 1.3, is_most=True),
)  # fmt: skip


def goals(results: Mapping[str, Result]) -> str:
    """Each goal, and what was reached."""
    rows = []
    for goal in GOALS:
        result = results.get(goal.result)
        by_peer = {} if result is None else result.medians.get(goal.key, {})
        if result is None or goal.peer not in by_peer or goal.baseline not in by_peer:
            continue
        reached = by_peer[goal.peer][goal.figure] / by_peer[goal.baseline][goal.figure]
        low, high = result.range_of_ratio(goal.key, goal.peer, goal.figure, goal.baseline)
        is_met = reached <= goal.limit if goal.is_most else reached >= goal.limit
        limit = f"at {'most' if goal.is_most else 'least'} {goal.limit:.2f}"
        rows.append([goal.text, limit, f"{reached:.2f} ({low:.2f}–{high:.2f})", "yes" if is_met else "no"])
    if (memory := results.get("memory")) is not None:
        for key, ratios in memory.ratios.items():
            reached = ratios["staging_of_limit"]
            text = f"host memory of pushes, {key}: of twice the model and 256 MiB"
            rows.append([text, "at most 1.00", f"{reached:.2f}", "yes" if reached <= 1 else "no"])
    return markdown(["goal", "", "reached (lowest–highest)", "met"], rows)
