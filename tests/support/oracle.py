"""What has to hold after every fault, whatever it was."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from genserve.client import AsyncClient
from tests.support import on_runner_v2
from tests.support.footprint import Footprint, at_rest, settled
from tests.support.plain_vllm import PROMPTS

MAX_TOKENS = 4
"""Of the outputs by which weights are known. Digests tell each tensor; outputs tell that these are what is run."""
NUM_WARMING_STREAMS = on_runner_v2.fewer(64)
_NUM_WARMING_TOKENS = 20

Digests = dict[tuple[str, str], str]
Outputs = list[list[int]]


@dataclass(frozen=True)
class Likeness:
    """By what the weights of a checkpoint are known: digests of the live tensors, and greedy tokens by data-parallel
    rank."""

    digests: Digests
    outputs: dict[int, Outputs]


class OracleError(AssertionError):
    """The oracle does not hold. `findings` says why, by what was looked at."""

    def __init__(self, findings: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {finding}" for name, finding in findings.items()))
        self.findings = dict(findings)

    @property
    def is_final(self) -> bool:
        """Whether wrong weights, tokens or labels were seen, which no busy machine explains: no second try."""
        return bool(self.findings.keys() & {"baseline", "version", "committed", "digests", "outputs"})


@dataclass
class Oracle:
    """Knows the checkpoints by what a daemon showed of them after clean pushes, and what the daemon holds at rest.

    `committed` is every version somebody has committed, with the checkpoint it is of: whoever pushes writes it there.
    """

    client: AsyncClient
    daemon_pid: int
    census: Path
    checkpoints: Mapping[str, Path]
    num_engines: int = 1
    settle_timeout_s: float = 45.0
    committed: dict[int, str] = field(default_factory=dict)
    known: dict[str, Likeness] = field(default_factory=dict)
    baseline: Footprint | None = None
    is_satisfied: bool = False
    """Whether it held the last time, to the end."""

    async def begin(self) -> None:
        """Learns the checkpoints from clean pushes, a last of all. What the cold start shows is the first witness."""
        self.committed[await self.served_version()] = "a"
        cold = await self.likeness()
        for name in ("b", "a"):
            await self.push(name)
            self.known[name] = await self.likeness()
        if self.known["a"] != cold or self.known["a"] == self.known["b"]:
            raise OracleError(
                {"baseline": "a push of the served checkpoint differs from the cold start, or b does not"}
            )
        for name in ("b", "a") * 2:  # thread pools and the allocators' reserves have nearly reached their size then
            await self.push(name)
        # The buffers of a large batch are kept as well.
        prompts = [[number + 1, 7] for number in range(NUM_WARMING_STREAMS)]
        options: Any = {"max_tokens": _NUM_WARMING_TOKENS, "ignore_eos": True}
        await asyncio.gather(*(self.client.generate(each, **options) for each in prompts))
        self.baseline = await at_rest(self.daemon_pid, self.census)

    async def served_version(self) -> int:
        """What the daemon says it serves."""
        return (await self.client.get_weights()).weight_version

    async def likeness(self) -> Likeness:
        """What is live now."""
        served = await self.client.get_weights(include_digests=True)
        return Likeness(served.digests, {rank: await self._outputs(rank) for rank in range(self.num_engines)})

    async def push(self, name: str) -> int:
        """A clean push of a checkpoint; its version."""
        version = await self.served_version() + 1
        await self.client.push_weights(self.checkpoints[name], version=version, timeout_s=60.0)
        self.committed[version] = name
        return version

    async def holds(self, *expected: tuple[int, str], settles: bool = True) -> None:
        """Raises OracleError unless one of these versions of a checkpoint is served, whole and by that label, nothing
        is left behind, and a push and a request work. Leaves the daemon on checkpoint a.

        Without `settles` the footprint is looked at only after the pushes, which drop what others have staged.
        """
        self.is_satisfied = False
        await self._runs()
        await self._serves(*expected)
        if settles:
            await self._is_at_rest(memory=False)  # it stays, and is looked at when the pushes are over
        for name in ("b", "a"):  # b first: a push of what is served would prove nothing
            version = await self.push(name)
            await self._serves((version, name))
        await self._is_at_rest()
        self.is_satisfied = True

    async def _runs(self) -> None:
        state = (await self.client.status()).state
        if state.phase != "running" or state.pauses:
            raise OracleError({"phase": f"{state.phase}, {len(state.pauses)} pauses"})

    async def _serves(self, *expected: tuple[int, str]) -> None:
        findings: dict[str, str] = {}
        version = await self.served_version()
        name = dict(expected).get(version)
        if name is None:
            findings["version"] = f"{version} is served, expected is one of {expected}"
            name = expected[0][1]
        if self.committed.get(version) != name:
            findings["committed"] = f"version {version} was committed as {self.committed.get(version)}, not {name}"
        live, known = await self.likeness(), self.known[name]
        if live.digests != known.digests:
            others = [other for other, likeness in self.known.items() if likeness.digests == live.digests]
            wrong = sorted(str(key) for key in known.digests if live.digests.get(key) != known.digests[key])
            findings["digests"] = f"not those of {name}: of {others or 'no known checkpoint'}, {wrong[:3]} differ"
        if live.outputs != known.outputs:
            findings["outputs"] = f"not those of {name}"
        if findings:
            raise OracleError(findings)

    async def _is_at_rest(self, *, memory: bool = True) -> None:
        if self.baseline is None:
            raise ValueError("the oracle has not begun")
        findings = await settled(self.daemon_pid, self.census, self.baseline, self.settle_timeout_s, memory=memory)
        if findings:
            raise OracleError(findings)

    async def _outputs(self, rank: int) -> Outputs:
        outputs = []
        for prompt in PROMPTS:
            generation = await self.client.generate(
                prompt,
                temperature=0.0,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                data_parallel_rank=rank if self.num_engines > 1 else None,
                timeout_s=60.0,
            )
            outputs.append(generation.token_ids)
        return outputs
