"""`cycle`: what a training run gets out of its generation: long streams without a pause, and a push every few seconds.

The ways take turns in every round, each with streams of its own. What a push costs is told against a stretch without a
push of the same round and of the same server: `no_pushes` for the daemon, `in_process_no_pushes` for the ways that
update an AsyncLLM in the process of its client, which has no server at all.

Takes about two hours with its defaults, and eight minutes with --quick, a push every 5 s.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench import engines, machine
from bench.genserve_daemon import start_daemon
from bench.options import Defaults, Options
from bench.processes import Program, say
from bench.results.result import Result, medians
from bench.updates import naive_update, trainer
from bench.updates.window import PROMPT_TOKENS, Plan, Window
from genserve.client import AsyncClient
from tests.support import models
from tests.support.daemon_process import DaemonProcess

BASELINES = {
    "genserve": "no_pushes",
    "genserve_reuse": "no_pushes",
    "tmpfs": "in_process_no_pushes",
    "collective_rpc": "in_process_no_pushes",
}
"""What each way to push is held against."""
PEERS = ("no_pushes", "genserve", "genserve_reuse", "in_process_no_pushes", "tmpfs", "collective_rpc")
KV_POLICIES = {"genserve": "recompute", "genserve_reuse": "reuse"}
DEFAULTS = Defaults(PEERS, rounds=3, model="smollm2", concurrency=(8, 64), pushes=3)
KV_CACHE_BYTES = 2 << 30  # 64 streams of 64 + 700 tokens fit
MODELS_IN_MEMORY = 12


async def run(options: Options) -> Result:
    """Every number of streams and interval, one after the other."""
    facts = machine.facts()
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = engines.model(options.model, directory)
        size_bytes = engines.model_bytes(checkpoint)
        machine.require_memory(MODELS_IN_MEMORY * size_bytes + 2 * KV_CACHE_BYTES + (6 << 30), "cycle")
        other = models.perturbed(checkpoint, directory / "other", seed=1, scale=0.01)
        cycle = await Cycle.start(checkpoint, other, directory, options, stack)
        rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
        for num_streams in options.concurrency:
            for interval_s in options.intervals:
                key = f"{num_streams} streams, {interval_s} s"
                rounds[key] = await cycle.measure(key, Plan(num_streams, interval_s, options.pushes, 0))
    by_key = {key: {peer: medians(each) for peer, each in by_peer.items()} for key, by_peer in rounds.items()}
    return Result(
        "cycle",
        machine=facts,
        settings={
            "engine": engines.flags(kv_cache_bytes=KV_CACHE_BYTES),
            "environment": engines.ENVIRONMENT,
            "model": options.model,
            "rounds": options.rounds,
            "pushes": options.pushes,
            "intervals_s": options.intervals,
            "concurrency": options.concurrency,
            "prompt_tokens": PROMPT_TOKENS,
            "client": "GenerateMany of genserve's client; AsyncLLM.generate in process",
            "peers": options.peers,
        },
        rounds=rounds,
        medians=by_key,
        ratios={
            key: {peer: each["share"] for peer, each in by_peer.items() if "share" in each}
            for key, by_peer in by_key.items()
        },
        notes={"bytes": {options.model: size_bytes}, "ratio_to": BASELINES},
    )


class Cycle:
    """The engines, started. Made by `start`."""

    def __init__(self, checkpoints: list[str], options: Options) -> None:
        self._checkpoints = checkpoints
        self._options = options
        self._daemon: DaemonProcess | None = None
        self._pusher: Program | None = None
        self._plain: Program | None = None
        self._num_windows = 0

    @classmethod
    async def start(
        cls, checkpoint: Path, other: Path, directory: Path, options: Options, stack: AsyncExitStack
    ) -> "Cycle":
        """Those that are asked for; `stack` ends them. Raises PeerError."""
        cycle = cls([str(other), str(checkpoint)], options)
        flags = ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        if {"no_pushes", *KV_POLICIES} & set(options.peers):
            say("starting genserve")
            cycle._daemon = await start_daemon(checkpoint, directory, stack, flags=flags)
            cycle._pusher = await trainer.start("cycle", cycle._daemon.address, directory)
            stack.callback(cycle._pusher.stop)
            await cycle._pusher.order(do="load", weights=str(checkpoint), others=[str(other)])
        if {"in_process_no_pushes", "tmpfs", "collective_rpc"} & set(options.peers):
            say("starting a plain engine")
            cycle._plain = await naive_update.start(checkpoint, directory, flags)
            stack.callback(cycle._plain.stop)
        return cycle

    async def measure(self, key: str, plan: Plan) -> dict[str, list[dict[str, float]]]:
        """All rounds of one number of streams and one interval; a short one before warms up."""
        rounds: dict[str, list[dict[str, float]]] = {peer: [] for peer in self._options.peers}
        for peer in rounds:
            await self._window(peer, replace(plan, num_pushes=1, interval_s=2.0))
        for number in range(self._options.rounds):
            for peer in rounds if number % 2 == 0 else reversed(rounds):
                figures = (await self._window(peer, plan)).figures()
                rounds[peer].append(figures)
                shown = " ".join(f"{name} {value:.2f}" for name, value in figures.items())
                say(f"{key}, round {number}: {peer:20} {shown}")
        for peer, figures_of in rounds.items():
            for number, figures in enumerate(figures_of):
                if baseline := rounds.get(BASELINES.get(peer, "")):
                    figures |= cost(figures, baseline[number], plan.num_pushes)
        return rounds

    async def _window(self, peer: str, plan: Plan) -> Window:
        """One stretch of one peer."""
        self._num_windows += 1
        plan = replace(plan, seed=self._num_windows, way=peer if peer in BASELINES else None)
        plan = replace(plan, checkpoints=self._checkpoints)
        pids = [each.process.pid for each in (self._daemon, self._plain) if each is not None]
        await machine.rest("an engine", *pids)
        if peer == "no_pushes" or peer in KV_POLICIES:
            return await self._genserve(plan)
        assert self._plain is not None
        return Window(**await self._plain.order(do="cycle", plan=asdict(plan)))

    async def _genserve(self, plan: Plan) -> Window:
        assert self._daemon is not None and self._pusher is not None
        window = Window(plan.num_streams)
        async with AsyncClient(self._daemon.address) as client:
            version = (await client.get_weights()).weight_version
            streaming = asyncio.create_task(_stream(client, plan, window, version))
            try:
                await window.carry_out(plan, self._push(plan))
            finally:
                if not streaming.cancel():
                    streaming.result()  # it ends only by an error
                await asyncio.wait([streaming])
        return window

    def _push(self, plan: Plan) -> Callable[[int], Awaitable[None]]:
        async def push(number: int) -> None:
            assert self._pusher is not None and plan.way is not None
            weights = plan.checkpoints[number % len(plan.checkpoints)]
            await self._pusher.order(do="push", weights=weights, kv_policy=KV_POLICIES[plan.way])

        return push


async def _stream(client: AsyncClient, plan: Plan, window: Window, version: int) -> None:
    """All streams over one call, until cancelled. `version` is served when the window begins."""
    prompts = [plan.prompts(slot) for slot in range(plan.num_streams)]
    slots: dict[str, int] = {}
    async with client.stream_many() as many:

        async def submit(slot: int) -> None:
            options: dict[str, Any] = {
                "max_tokens": plan.max_tokens,
                "ignore_eos": True,
                "temperature": 0.0,
                "text": False,
            }
            slots[await many.submit(next(prompts[slot]), **options)] = slot

        for slot in range(plan.num_streams):
            await submit(slot)
        async for item in many:
            if item.error is not None:
                raise item.error
            slot = slots[item.request_id]
            now = time.monotonic()
            for output in () if item.delta is None else item.delta.outputs:
                for span in output.weight_spans:
                    window.arrivals[slot].append((now, span.end - span.start, span.version - version))
            if item.is_last:
                del slots[item.request_id]
                await submit(slot)


def cost(figures: dict[str, float], baseline: dict[str, float], num_pushes: int) -> dict[str, float]:
    """What pushes cost: the share of the tokens that came all the same, how many seconds of generation without a push
    were lost for each push, and how many seconds there were for each, more than planned where pushes take longer."""
    share = figures["tokens_per_s"] / baseline["tokens_per_s"]
    return {
        "share": share,
        "lost_s_per_push": (1 - share) * figures["window_s"] / num_pushes,
        "seconds_per_push": figures["window_s"] / num_pushes,
    }
