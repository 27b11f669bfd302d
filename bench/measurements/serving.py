"""`serving`: what a token costs on its way through a server, in front of an engine that computes nothing.

The engine is bench.mock_engine. Where a step takes 50 ms no server falls behind, and each token is a message by itself.
Where steps take no time, a server passes tokens on as fast as it can, several in one message where it falls behind.
Cores are counted as the CPU time of all processes of a server but the engine's.

Takes half an hour with its defaults, and five minutes with --quick, at 64 at once.
"""

from bench.measurements.generate import SERVERS
from bench.measurements.rounds import Rounds, medians_of, prompts_of
from bench.options import Defaults, Options
from bench.processes import PeerError
from bench.results.result import Result
from bench.results.tables import BASELINE, PACE_MS, row_name
from bench.traces import Work

PEERS = (
    *("in_process", "vllm_grpc", "vllm_http", "vllm_http_tokens"),
    *("rust_http", "rust_http_tokens", "rust_grpc"),
    *("genserve_generate", "genserve_many"),
)
FLAGS = ("--distributed-executor-backend", "bench.mock_engine.MockExecutor")
DEFAULTS = Defaults(PEERS, concurrency=(64, 256), quick_concurrency=(64,), outputs=("tokens",))
PACES_MS = (PACE_MS, 0)
MAX_TOKENS, REQUESTS_PER_SLOT = 64, 4


async def run(options: Options) -> Result:
    """Everything; raises PeerError naming the peer that cannot be run or does not give the tokens."""
    async with Rounds.begun("serving", options, SERVERS, FLAGS) as rounds:
        for outputs in options.outputs:
            for concurrency in options.concurrency:
                for pace_ms in PACES_MS:
                    prompts = prompts_of(max(REQUESTS_PER_SLOT // options.divisor, 1) * concurrency)
                    paced = [[pace_ms, *prompt[1:]] for prompt in prompts]
                    work = Work(paced, concurrency, MAX_TOKENS, outputs=outputs)
                    await rounds.measure(row_name(concurrency, pace_ms, outputs), work)
    with_rates = {row: _with_rates(by_peer) for row, by_peer in rounds.figures.items()}
    ratios = {row: per_core_ratios(by_peer) for row, by_peer in medians_of(with_rates).items()}
    return rounds.result(with_rates, ratios, {}, max_tokens=MAX_TOKENS)


def _with_rates(by_peer: dict[str, list[dict[str, float]]]) -> dict[str, list[dict[str, float]]]:
    """The figures of each round, with the tokens that a second of CPU time of the server is good for."""
    for peer, each in by_peer.items():
        for figures in each:
            if not figures["cpu_server_us"]:
                raise PeerError(peer, "it took too little CPU time to be measured: ask for more streams")
            figures["tokens_per_core_s"] = 1e6 / figures["cpu_server_us"]
    return by_peer


def per_core_ratios(by_peer: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """peer -> its tokens per second of a core over the baseline's."""
    if BASELINE not in by_peer:
        return {}
    baseline = by_peer[BASELINE]["tokens_per_core_s"]
    return {peer: {"tokens_per_core_s": each["tokens_per_core_s"] / baseline} for peer, each in by_peer.items()}
