"""A trainer on a host of its own: `python -m bench.fleet.trainer ROUNDS CHECKPOINT CHECKPOINT ADDRESS...`.

Pushes the checkpoints in turns, to all addresses at once, and prints seconds for each round as a line of JSON. With
several addresses it is what trainers do without a router.
"""

import asyncio
import json
import sys
import time

from genserve.client import AsyncClient


async def push(rounds: int, checkpoints: list[str], addresses: list[str]) -> None:
    """Prints how long each round takes."""
    clients = [AsyncClient(address) for address in addresses]
    for number in range(rounds):
        sys.stdin.readline()  # whoever measures has counted what was sent before
        version = max([(await client.status()).state.weight_version for client in clients]) + 1
        began_s = time.monotonic()
        results = await asyncio.gather(
            *(client.push_weights(checkpoints[number % 2], version=version, timeout_s=300) for client in clients)
        )
        steps = {name: seconds for each in results if each.applied for name, seconds in each.applied.step_s.items()}
        print(json.dumps({"total_s": time.monotonic() - began_s, **steps}), flush=True)
    for client in clients:
        await client.close()


if __name__ == "__main__":
    rounds, first, second, *addresses = sys.argv[1:]
    asyncio.run(push(int(rounds), [first, second], addresses))
