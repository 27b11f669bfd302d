"""`generate`: what serving costs. Tokens per second, latency and CPU time by concurrency, every peer in one run.

Each round asks every peer once, forwards and then backwards; the first round warms up. Greedy, of a fixed length: every
peer must give the same number of tokens and, one request at a time, the same tokens. With more at once the batches of a
step differ from run to run, and with them the last bits of a sum: there a share of the sequences must be the same, and
the share is told. With --outputs logprobs every peer gives the log-probability of each token too, with text also the
text: at 64 and 256 at once.

Takes about an hour and a half with its defaults, and ten minutes with --quick, at 1 and 64 at once.
"""

import gc
import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from bench import cpu, engines, machine
from bench.options import Defaults, Options
from bench.peers import GenerationServer
from bench.peers.genserve_generation import Genserve, GenserveFrontEnds
from bench.peers.grpc_floor import GrpcFloor
from bench.peers.in_process import InProcess
from bench.peers.rust_server import RustServer
from bench.peers.vllm_grpc import VllmGrpc
from bench.peers.vllm_http import VllmHttp
from bench.processes import PeerError, say
from bench.results.generation_tables import ceiling_of
from bench.results.result import Result, medians
from bench.traces import Figures, Trace, Work
from bench.turns import turns

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
PROMPT_TOKENS, MAX_TOKENS = 5, 64
LEAST_REQUESTS, MOST_REQUESTS, REQUESTS_PER_SLOT = 8, 512, 8
LEAST_SAME_SHARE = 0.9
LARGE = (64, 256)
"""The concurrencies at which other outputs than token ids are measured."""


@dataclass(slots=True)
class Measured:
    """What is known so far: figures of each round but the first by row (a concurrency and what is asked for) and peer;
    in the notes of a result, CPU time by process, and how long a peer takes until it rests."""

    rounds: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)
    cpu_us: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)
    rest_s: dict[str, list[float]] = field(default_factory=dict)


async def run(options: Options) -> Result:
    """Everything; raises PeerError naming the peer that cannot be run or does not give the tokens."""
    facts = machine.facts()
    servers: dict[str, GenerationServer] = {}
    measured = Measured()
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = engines.model(options.model, directory)
        for kind in SERVERS:
            if wanted := [peer for peer in kind.peers if peer in options.peers]:
                say(f"starting {kind.__name__}")
                server = kind()
                await server.start(checkpoint, directory, stack)
                servers |= dict.fromkeys(wanted, server)
        for outputs in options.outputs:
            for concurrency in _concurrencies(options.concurrency, outputs):
                await _measure(servers, concurrency, outputs, options, measured)
    rounds = measured.rounds
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
            "client": "uvloop; aiohttp or a bare socket, and msgspec, for HTTP",
            "peers": list(servers),
        },
        rounds=rounds,
        medians={key: {peer: medians(each) for peer, each in by_peer.items()} for key, by_peer in rounds.items()},
        ratios=_ratios(rounds),
        notes={
            "median_s_to_rest_after": {peer: median(each) for peer, each in measured.rest_s.items()},
            "median_cpu_us_per_token": {
                key: {peer: cpu.medians(each) for peer, each in by_peer.items()}
                for key, by_peer in measured.cpu_us.items()
            },
        },
    )


def _concurrencies(asked: Sequence[int], outputs: str) -> list[int]:
    """Of those asked for, the ones to measure: for more than token ids only the large ones, if there are any."""
    large = [each for each in asked if each in LARGE]
    return large if outputs != "tokens" and large else list(asked)


def row_name(concurrency: int, outputs: str) -> str:
    """Where a result has the figures: `64`, `64 logprobs`, `64 text`."""
    return str(concurrency) if outputs == "tokens" else f"{concurrency} {outputs}"


async def _measure(
    servers: dict[str, GenerationServer], concurrency: int, outputs: str, options: Options, measured: Measured
) -> None:
    """All rounds of one concurrency."""
    num_requests = min(max(REQUESTS_PER_SLOT * concurrency, LEAST_REQUESTS), MOST_REQUESTS) // options.divisor
    prompts = _prompts(max(num_requests, concurrency))
    peers = [peer for peer, server in servers.items() if outputs != "text" or peer not in server.without_text]
    row = row_name(concurrency, outputs)
    rounds = measured.rounds[row] = {peer: [] for peer in peers}
    by_process = measured.cpu_us[row] = {peer: [] for peer in peers}
    expected: list[Trace] | None = None
    for number, peer in turns(peers, options.rounds):
        server = servers[peer]
        work = Work(prompts, concurrency, MAX_TOKENS, final_only=peer.endswith("_final"), outputs=outputs)
        gc.collect()
        gc.freeze()  # what start-up has left is not walked while streams wait: as in every server
        before, client_before = cpu.seconds(server.pid), cpu.seconds(os.getpid(), recursive=False)
        traces = await server.generate(peer, work)
        after, client_after = cpu.seconds(server.pid), cpu.seconds(os.getpid(), recursive=False)
        measured.rest_s.setdefault(peer, []).append(await machine.rest(peer, server.pid))
        expected = traces if expected is None else expected
        same_share = _same_share(peer, traces, expected, work)
        num_tokens = len(traces) * MAX_TOKENS
        (client_us,) = cpu.per_token(client_before, client_after, num_tokens).values()
        spent = cpu.per_token(before, after, num_tokens)
        figures = {
            **asdict(Figures.of(traces)),
            "same_share": same_share,
            **cpu.figures(0.0 if server.is_own_client else client_us, spent),
        }
        say(
            f"{row:>12} at once, round {number}: {peer:25} {figures['tokens_per_s']:9.0f} tok/s, "
            f"{figures['cpu_client_us']:4.0f} + {figures['cpu_server_us']:4.0f} us a token"
        )
        if number > 0:
            rounds[peer].append(figures)
            by_process[peer].append(spent if server.is_own_client else {"client": client_us, **spent})


def _prompts(count: int) -> list[list[int]]:
    """The same for every peer, no two alike."""
    generator = random.Random(0)
    return [[generator.randrange(1, 500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def _same_share(peer: str, traces: Sequence[Trace], expected: Sequence[Trace], work: Work) -> float:
    """The share of sequences whose tokens are those of the first peer in the first round. Raises PeerError, also when
    something lacks that was asked for."""
    if any(len(trace.token_ids) != MAX_TOKENS for trace in traces) or len(traces) != len(expected):
        raise PeerError(peer, f"it did not give {MAX_TOKENS} tokens for each prompt")
    if work.logprobs and any(len(trace.logprobs) != MAX_TOKENS or max(trace.logprobs) > 0 for trace in traces):
        raise PeerError(peer, "it did not give the log-probability of each token")
    if work.text and not all("".join(trace.texts) for trace in traces):
        raise PeerError(peer, "it did not give text")
    same = sum(trace.token_ids == other.token_ids for trace, other in zip(traces, expected, strict=True))
    same_share = same / len(expected)
    if same_share < (1.0 if work.concurrency == 1 else LEAST_SAME_SHARE):
        raise PeerError(peer, f"only {same} of {len(expected)} greedy sequences are those of the first peer")
    return same_share


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
