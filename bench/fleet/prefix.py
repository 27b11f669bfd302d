"""How much of the prompts is found in prefix caches: `python -m bench.fleet.prefix`.

Four daemons with a tiny model serve agents, whose every turn continues what they have said, and groups of samples of
one prompt, all at once. The ways to choose a replica take turns on the same load, with empty caches: a router with its
default policies, one with round-robin, and a client that chooses as torchrl's LoadBalancer does with its defaults: the
hash of a prompt's first tokens, unless that replica has more than 1.5 times the mean of requests. What is told: the
share of prompt tokens found in a cache, and the 99th percentile of the time to an answer.
"""

import argparse
import asyncio
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

from bench import engines
from genserve.client import AsyncClient, Generation
from tests.support.daemon_process import DaemonProcess

NUM_REPLICAS = 4
_NUM_AGENTS, _NUM_TURNS, _TURN_TOKENS = 24, 6, 96
_NUM_GROUPS, _GROUP, _GROUP_TOKENS = 48, 8, 384
_SYSTEM_TOKENS, _ANSWER_TOKENS = 64, 16
_GROUPS_AT_ONCE = 6

Send = Callable[[list[int]], Awaitable[Generation]]


async def load(send: Send, seed: int) -> tuple[float, float]:
    """The hit rate, and the 99th percentile of seconds to an answer."""
    rng = random.Random(seed)
    system = [rng.randrange(5, 500) for _ in range(_SYSTEM_TOKENS)]
    prompt_tokens = cached_tokens = 0
    latencies_s: list[float] = []

    async def ask(prompt: list[int]) -> list[int]:
        nonlocal prompt_tokens, cached_tokens
        began_s = time.monotonic()
        generation = await send(prompt)
        latencies_s.append(time.monotonic() - began_s)
        assert generation.usage is not None
        prompt_tokens += generation.usage.num_prompt_tokens
        cached_tokens += generation.usage.num_cached_tokens
        return list(generation.token_ids)

    async def agent(own: random.Random) -> None:
        said = list(system)
        for _ in range(_NUM_TURNS):
            said += [own.randrange(5, 500) for _ in range(_TURN_TOKENS)]
            said += await ask(said)
            await asyncio.sleep(own.uniform(0, 0.2))

    async def groups(own: random.Random, count: int) -> None:
        for _ in range(count):
            prompt = system + [own.randrange(5, 500) for _ in range(_GROUP_TOKENS)]
            await asyncio.gather(*(ask(prompt) for _ in range(_GROUP)))

    agents = [agent(random.Random(f"{seed}/agent/{number}")) for number in range(_NUM_AGENTS)]
    share = _NUM_GROUPS // _GROUPS_AT_ONCE
    samples = [groups(random.Random(f"{seed}/group/{number}"), share) for number in range(_GROUPS_AT_ONCE)]
    await asyncio.gather(*agents, *samples)
    return cached_tokens / prompt_tokens, float(np.percentile(latencies_s, 99))


class Torchrl:
    """Chooses as torchrl's LoadBalancer does by default, and calls the replicas itself."""

    def __init__(self, clients: list[AsyncClient]) -> None:
        self._clients = clients
        self._running = [0] * len(clients)

    async def send(self, prompt: list[int]) -> Generation:
        """To the replica of the prompt's first eight tokens, or the least busy one."""
        digest = hashlib.md5(str(tuple(prompt[:8])).encode()).hexdigest()
        chosen = int(digest, 16) % len(self._clients)
        if self._running[chosen] > 1.5 * sum(self._running) / len(self._running):
            chosen = self._running.index(min(self._running))
        self._running[chosen] += 1
        try:
            return await generated(self._clients[chosen], prompt)
        finally:
            self._running[chosen] -= 1


async def generated(client: AsyncClient, prompt: list[int]) -> Generation:
    """An answer of a fixed length."""
    return await client.generate(prompt, max_tokens=_ANSWER_TOKENS, ignore_eos=True, text=False, timeout_s=600)


async def measure(way: str, addresses: list[str], rounds: int) -> None:
    """Prints a line of JSON. `way`: policies of a router, or torchrl."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(address)) for address in addresses]
        found: list[tuple[float, float]] = []
        for number in range(rounds):
            for client in clients:
                await client.reset_cache()
            if way == "torchrl's":
                found.append(await load(Torchrl(clients).send, number))
                continue
            with routed(way, addresses) as address:
                async with AsyncClient(address) as client:
                    await client.wait_ready(60)
                    found.append(await load(partial(generated, client), number))
        hits, waits = zip(*found, strict=True)
        told = {"way": way, "hit_rate": round(float(np.median(hits)), 3), "p99_s": round(float(np.median(waits)), 2)}
        print(json.dumps({**told, "hit_rates": [round(hit, 3) for hit in hits]}), flush=True)


@contextmanager
def routed(policies: str, addresses: list[str]) -> Iterator[str]:
    """A router; its address."""
    replicas = [flag for address in addresses for flag in ("--replica", address)]
    command = [sys.executable, "-m", "genserve", "route", "--port", "0", "--policy", policies, *replicas]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


def main() -> None:
    """Starts the daemons, and measures each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--kv-cache-mb", type=int, default=24, metavar="MB", help="of each daemon (default: 24)")
    args = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = engines.model("tiny", directory)
        flags = engines.flags(kv_cache_bytes=args.kv_cache_mb << 20, max_num_seqs=32)
        daemons = [
            DaemonProcess(["--model", str(checkpoint), *flags], directory / f"daemon{number}", engines.ENVIRONMENT)
            for number in range(NUM_REPLICAS)
        ]
        for daemon in daemons:
            stack.callback(daemon.kill)
            daemon.wait_serving(300)
        addresses = [daemon.address for daemon in daemons]
        for way in ("session,prefix-aware,requests", "round-robin", "torchrl's"):
            uvloop.run(measure(way, addresses, args.rounds))


if __name__ == "__main__":
    main()
