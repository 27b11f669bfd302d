"""Rounds of generation: every server is asked in turn for the same, and what each took is kept."""

import gc
import os
import random
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from bench import cpu, engines, machine
from bench.machine import turns
from bench.options import Options
from bench.peers import GenerationServer
from bench.processes import PeerError, say
from bench.results.result import Result, medians
from bench.traces import Figures, Trace, Work

PROMPT_TOKENS = 5
LEAST_SAME_SHARE = 0.9


@dataclass(slots=True)
class Rounds:
    """The servers of the peers that `options` name, and what is known so far: figures of each round but the first by
    row (a concurrency and what is asked for) and peer; in the notes of a result, CPU time by process, and how long a
    peer takes until it rests. Made by `begun`."""

    name: str
    options: Options
    servers: dict[str, GenerationServer]
    machine: dict[str, Any]
    flags: Sequence[str]
    figures: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)
    cpu_us: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)
    rest_s: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    @asynccontextmanager
    async def begun(
        cls, name: str, options: Options, kinds: Sequence[type[GenerationServer]], flags: Sequence[str] = ()
    ) -> AsyncIterator[Self]:
        """Starts the servers, with further flags of their engines, and ends them."""
        facts = machine.facts()  # before the servers take their share of the machine
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            checkpoint = engines.model(options.model, directory)
            servers: dict[str, GenerationServer] = {}
            for kind in kinds:
                if wanted := [peer for peer in kind.peers if peer in options.peers]:
                    say(f"starting {kind.__name__}")
                    server = kind()
                    await server.start(checkpoint, directory, stack, flags)
                    servers |= dict.fromkeys(wanted, server)
            yield cls(name, options, servers, facts, flags)

    async def measure(self, row: str, work: Work) -> None:
        """All rounds of one row. Whether a peer sends one message with all tokens is said by its name."""
        peers = [peer for peer, server in self.servers.items() if not (work.text and peer in server.without_text)]
        figures_of = self.figures[row] = {peer: [] for peer in peers}
        by_process = self.cpu_us[row] = {peer: [] for peer in peers}
        expected: list[Trace] | None = None
        for number, peer in turns(peers, self.options.rounds):
            server = self.servers[peer]
            asked = replace(work, final_only=peer.endswith("_final"))
            gc.collect()
            gc.freeze()  # what start-up has left is not walked while streams wait: as in every server
            before, client_before = cpu.seconds(server.pid), cpu.seconds(os.getpid(), recursive=False)
            traces = await server.generate(peer, asked)
            after, client_after = cpu.seconds(server.pid), cpu.seconds(os.getpid(), recursive=False)
            self.rest_s.setdefault(peer, []).append(await machine.rest(peer, server.pid))
            expected = traces if expected is None else expected
            share = same_share(peer, traces, expected, asked)
            num_tokens = len(traces) * work.max_tokens
            (client_us,) = cpu.per_token(client_before, client_after, num_tokens).values()
            spent = cpu.per_token(before, after, num_tokens)
            figures = {
                **asdict(Figures.of(traces)),
                "same_share": share,
                **cpu.figures(0.0 if server.is_own_client else client_us, spent),
            }
            say(
                f"{row:>12}, round {number}: {peer:25} {figures['tokens_per_s']:9.0f} tok/s, "
                f"{figures['cpu_client_us']:4.0f} + {figures['cpu_server_us']:4.0f} us a token"
            )
            if number > 0:
                figures_of[peer].append(figures)
                by_process[peer].append(spent if server.is_own_client else {"client": client_us, **spent})

    def result(
        self,
        rounds: dict[str, dict[str, list[dict[str, float]]]],
        ratios: dict[str, Any],
        notes: dict[str, Any],
        **settings: Any,
    ) -> Result:
        """With `notes` and `settings` beside those of both measurements."""
        return Result(
            self.name,
            machine=self.machine,
            settings={
                "model": self.options.model,
                "engine": [*engines.flags(), *self.flags],
                "environment": engines.ENVIRONMENT,
                "prompt_tokens": PROMPT_TOKENS,
                "rounds": self.options.rounds,
                "peers": list(self.servers),
                **settings,
            },
            rounds=rounds,
            medians=medians_of(rounds),
            ratios=ratios,
            notes={
                "median_cpu_us_per_token": {
                    row: {peer: cpu.medians(each) for peer, each in by_peer.items()}
                    for row, by_peer in self.cpu_us.items()
                },
                **notes,
            },
        )


def medians_of(
    rounds: Mapping[str, Mapping[str, Sequence[dict[str, float]]]],
) -> dict[str, dict[str, dict[str, float]]]:
    """By row and by peer."""
    return {row: {peer: medians(each) for peer, each in by_peer.items()} for row, by_peer in rounds.items()}


def prompts_of(count: int) -> list[list[int]]:
    """The same for every peer, no two alike."""
    generator = random.Random(0)
    return [[generator.randrange(1, 500) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def same_share(peer: str, traces: Sequence[Trace], expected: Sequence[Trace], work: Work) -> float:
    """The share of sequences whose tokens are those of the first peer in the first round. Raises PeerError, also when
    something lacks that was asked for."""
    if any(len(trace.token_ids) != work.max_tokens for trace in traces) or len(traces) != len(expected):
        raise PeerError(peer, f"it did not give {work.max_tokens} tokens for each prompt")
    if work.logprobs and any(len(trace.logprobs) != work.max_tokens or max(trace.logprobs) > 0 for trace in traces):
        raise PeerError(peer, "it did not give the log-probability of each token")
    if work.text and not all("".join(trace.texts) for trace in traces):
        raise PeerError(peer, "it did not give text")
    same = sum(trace.token_ids == other.token_ids for trace, other in zip(traces, expected, strict=True))
    share = same / len(expected)
    if share < (1.0 if work.concurrency == 1 else LEAST_SAME_SHARE):
        raise PeerError(peer, f"only {same} of {len(expected)} greedy sequences are those of the first peer")
    return share
