"""`generate`: what serving costs. Tokens per second, latency and CPU time by concurrency, every peer in one run.

Each round asks every peer once, forwards and then backwards; the first round warms up. Greedy, of a fixed length: every
peer must give the same number of tokens and, one request at a time, the same tokens. With more at once the batches of a
step differ from run to run, and with them the last bits of a sum: there a share of the sequences must be the same, and
the share is told. With --outputs logprobs every peer gives the log-probability of each token too, with text also the
text: at 64 and 256 at once.

Takes about an hour and a half with its defaults, and ten minutes with --quick, at 1 and 64 at once.
"""

from collections.abc import Sequence
from statistics import median

from bench.measurements.rounds import Rounds, prompts_of
from bench.options import Defaults, Options
from bench.peers import GenerationServer
from bench.peers.genserve_generation import Genserve, GenserveFrontEnds
from bench.peers.grpc_floor import GrpcFloor
from bench.peers.in_process import InProcess
from bench.peers.rust_server import RustServer
from bench.peers.vllm_grpc import VllmGrpc
from bench.peers.vllm_http import VllmHttp
from bench.results.result import Result, medians
from bench.results.tables import ceiling_of
from bench.traces import Work

SERVERS: tuple[type[GenerationServer], ...] = (
    InProcess,
    GrpcFloor,
    VllmGrpc,
    VllmHttp,
    RustServer,
    Genserve,
    GenserveFrontEnds,
)
PEERS = tuple(peer for server in SERVERS for peer in server.peers)
DEFAULTS = Defaults(PEERS, quick_concurrency=(1, 64))
MAX_TOKENS = 64
LEAST_REQUESTS, MOST_REQUESTS, REQUESTS_PER_SLOT = 8, 512, 8
LARGE = (64, 256)
"""The concurrencies at which other outputs than token ids are measured."""


async def run(options: Options) -> Result:
    """Everything; raises PeerError naming the peer that cannot be run or does not give the tokens."""
    async with Rounds.begun("generate", options, SERVERS) as rounds:
        for outputs in options.outputs:
            for concurrency in concurrencies(options.concurrency, outputs):
                num_requests = min(max(REQUESTS_PER_SLOT * concurrency, LEAST_REQUESTS), MOST_REQUESTS)
                prompts = prompts_of(max(num_requests // options.divisor, concurrency))
                work = Work(prompts, concurrency, MAX_TOKENS, outputs=outputs)
                await rounds.measure(row_name(concurrency, outputs), work)
    return rounds.result(
        rounds.figures,
        _ratios(rounds.figures),
        {"median_s_to_rest_after": {peer: median(each) for peer, each in rounds.rest_s.items()}},
        max_tokens=MAX_TOKENS,
        client="uvloop; aiohttp or a bare socket, and msgspec, for HTTP",
    )


def concurrencies(asked: Sequence[int], outputs: str) -> list[int]:
    """Of those asked for, the ones to measure: for more than token ids only the large ones, if there are any."""
    large = [each for each in asked if each in LARGE]
    return large if outputs != "tokens" and large else list(asked)


def row_name(concurrency: int, outputs: str) -> str:
    """Where a result has the figures: `64`, `64 logprobs`, `64 text`."""
    return str(concurrency) if outputs == "tokens" else f"{concurrency} {outputs}"


def _ratios(rounds: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """concurrency -> peer -> its median over the ceiling's: of tokens per second, and of the time to the first token.
    Peers that send one message are held against the ceiling that does."""
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for key, by_peer in rounds.items():
        for peer, each in by_peer.items():
            ceiling = by_peer.get(ceiling_of(peer))
            if ceiling is not None:
                own, best = medians(each), medians(ceiling)
                ratios.setdefault(key, {})[peer] = {
                    name: own[name] / best[name] for name in ("tokens_per_s", "ttft_p50_ms", "inter_token_p99_ms")
                    if best[name] > 0
                }  # fmt: skip
    return ratios
