"""`generate`: what serving costs. Tokens per second and latency by concurrency, every peer in one run.

Each round asks every peer once, forwards and then backwards; the first round warms up. Greedy, of a fixed length: every
peer must give the same number of tokens and, one request at a time, the same tokens. With more at once the batches of a
step differ from run to run, and with them the last bits of a sum: there a share of the sequences must be the same, and
the share is told.
"""

import gc
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from tests.bench import engines, machine
from tests.bench.options import Options
from tests.bench.peers import GenerationServer
from tests.bench.peers.genserve_generation import Genserve
from tests.bench.peers.grpc_floor import GrpcFloor
from tests.bench.peers.in_process import InProcess
from tests.bench.peers.vllm_grpc import VllmGrpc
from tests.bench.peers.vllm_http import VllmHttp
from tests.bench.processes import PeerError, say
from tests.bench.report import Result, medians
from tests.bench.traces import Figures, Trace, Work

SERVERS: tuple[type[GenerationServer], ...] = (InProcess, GrpcFloor, VllmGrpc, VllmHttp, Genserve)
PEERS = tuple(peer for server in SERVERS for peer in server.peers)
CEILING = "in_process"
PROMPT_TOKENS, MAX_TOKENS = 5, 64
LEAST_REQUESTS, MOST_REQUESTS, REQUESTS_PER_SLOT = 8, 512, 8
LEAST_SAME_SHARE = 0.9


async def run(options: Options) -> Result:
    """Everything; raises PeerError naming the peer that cannot be run or does not give the tokens."""
    facts = machine.facts()
    servers: dict[str, GenerationServer] = {}
    started: list[GenerationServer] = []
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = engines.model(options.model, Path(directory))
        try:
            for kind in SERVERS:
                if wanted := [peer for peer in kind.peers if peer in options.peers]:
                    say(f"starting {kind.__name__}")
                    server = kind()
                    started.append(server)
                    await server.start(checkpoint, Path(directory))
                    servers |= dict.fromkeys(wanted, server)
            rest_s: dict[str, list[float]] = {}
            rounds = {str(each): await _measure(servers, each, options, rest_s) for each in options.concurrency}
        finally:
            for server in started:
                await server.stop()
    return Result(
        "generate",
        machine=facts,
        settings={
            "model": options.model,
            "engine": engines.flags(),
            "environment": engines.ENVIRONMENT,
            "prompt_tokens": PROMPT_TOKENS,
            "max_tokens": MAX_TOKENS,
            "rounds": options.rounds,
            "client": "uvloop; aiohttp and msgspec for HTTP",
            "peers": list(servers),
        },
        rounds=rounds,
        medians={key: {peer: medians(each) for peer, each in by_peer.items()} for key, by_peer in rounds.items()},
        ratios=_ratios(rounds),
        notes={"median_s_to_rest_after": {peer: median(each) for peer, each in rest_s.items()}},
    )


async def _measure(
    servers: dict[str, GenerationServer], concurrency: int, options: Options, rest_s: dict[str, list[float]]
) -> dict[str, list[dict[str, float]]]:
    """All rounds of one concurrency: peer -> figures of each round but the first."""
    num_requests = min(max(REQUESTS_PER_SLOT * concurrency, LEAST_REQUESTS), MOST_REQUESTS) // options.divisor
    prompts = _prompts(max(num_requests, concurrency))
    rounds: dict[str, list[dict[str, float]]] = {peer: [] for peer in servers}
    expected: list[Trace] | None = None
    for number in range(options.rounds + 1):
        for peer in list(servers) if number % 2 == 0 else list(servers)[::-1]:
            work = Work(prompts, concurrency, MAX_TOKENS, final_only=peer.endswith("_final"))
            gc.collect()
            gc.freeze()  # what start-up has left is not walked while streams wait: as in every server
            traces = await servers[peer].generate(peer, work)
            rest_s.setdefault(peer, []).append(await machine.rest(peer, servers[peer].pid))
            expected = traces if expected is None else expected
            same_share = _same_share(peer, traces, expected, concurrency)
            figures = {**asdict(Figures.of(traces)), "same_share": same_share}
            say(f"{concurrency:>4} at once, round {number}: {peer:24} {figures['tokens_per_s']:9.0f} tok/s")
            if number > 0:
                rounds[peer].append(figures)
    return rounds


def _prompts(count: int) -> list[list[int]]:
    """The same for every peer, no two alike."""
    generator = random.Random(0)
    return [[generator.randrange(1, 500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _same_share(peer: str, traces: Sequence[Trace], expected: Sequence[Trace], concurrency: int) -> float:
    """The share of sequences whose tokens are those of the first peer in the first round. Raises PeerError."""
    if any(len(trace.token_ids) != MAX_TOKENS for trace in traces) or len(traces) != len(expected):
        raise PeerError(peer, f"it did not give {MAX_TOKENS} tokens for each prompt")
    same = sum(trace.token_ids == other.token_ids for trace, other in zip(traces, expected, strict=True))
    same_share = same / len(expected)
    if same_share < (1.0 if concurrency == 1 else LEAST_SAME_SHARE):
        raise PeerError(peer, f"only {same} of {len(expected)} greedy sequences are those of the first peer")
    return same_share


def _ratios(rounds: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, dict[str, dict[str, float]]]:
    """concurrency -> peer -> its median over the ceiling's: of tokens per second, and of the time to the first token.
    Peers that send one message are held against the ceiling that does."""
    ratios: dict[str, dict[str, dict[str, float]]] = {}
    for key, by_peer in rounds.items():
        for peer, each in by_peer.items():
            ceiling = by_peer.get(CEILING + ("_final" if peer.endswith("_final") else ""))
            if ceiling is not None:
                own, best = medians(each), medians(ceiling)
                ratios.setdefault(key, {})[peer] = {
                    name: own[name] / best[name] for name in ("tokens_per_s", "ttft_p50_ms", "inter_token_p99_ms")
                    if best[name] > 0
                }  # fmt: skip
    return ratios
