"""A real daemon on a tiny model, for clients in other languages: `python -m tests.support.tiny_server DIRECTORY`.

The first line on stdout is JSON with the `address` of the daemon, the one of a `proxy` in front of it, and paths in the
directory: `file`, a safetensors file of other weights for the same model, and `shards`, a checkpoint of the same
weights in several files. Each line on stdin is a command, and is answered by a line of JSON:

    reset            the proxy ends all of its connections
    throttle BYTES   the proxy sends so many bytes a second to the daemon over each connection; 0 = no limit
    push VERSION     the Python client pushes `file`: `digests` of the live weights then, by rank and name
"""

import asyncio
import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from genserve.client import AsyncClient
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess
from tests.support.fault_proxy import FaultProxy, Way
from tests.support.models import tiny_qwen3
from tests.support.vllm_plugin import load_in_engines


def _sharded(file: Path, directory: Path) -> Path:
    """The tensors of a file in two files and their index."""
    directory.mkdir()
    tensors = load_file(file)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(2):
        shard = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names[number::2]}, directory / shard)
        weight_map |= dict.fromkeys(names[number::2], shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


async def _carry_out(command: str, daemon: DaemonProcess, proxy: FaultProxy, file: Path) -> dict[str, object]:
    match command.split():
        case ["reset"]:
            proxy.reset()
            return {}
        case ["throttle", number]:
            proxy.switch(Way.TO_SERVER, bytes_per_s=float(number) or None)
            return {}
        case ["push", number]:
            async with AsyncClient(daemon.address) as client:
                await client.push_weights(file, version=int(number))
                digests = (await client.get_weights(include_digests=True)).digests
            return {"digests": {f"{rank} {name}": digest for (rank, name), digest in digests.items()}}
        case _:
            return {"error": f"unknown command {command!r}"}


async def main() -> None:
    """Serves until stdin ends."""
    directory = Path(sys.argv[1])
    model = tiny_qwen3(directory / "served")
    file = tiny_qwen3(directory / "other", seed=1) / "model.safetensors"
    shards = _sharded(file, directory / "shards")
    flags = ["--model", str(model), *SMALL_ENGINE]
    load_in_engines()
    daemon = DaemonProcess(flags, directory / "daemon.log", cold=True)
    try:
        await asyncio.to_thread(daemon.wait_serving)
        async with FaultProxy(daemon.address) as proxy:
            paths = {"file": str(file), "shards": str(shards)}
            print(json.dumps({"address": daemon.address, "proxy": proxy.address, **paths}), flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps(await _carry_out(line.strip(), daemon, proxy, file)), flush=True)
    finally:
        await asyncio.to_thread(daemon.stop)


if __name__ == "__main__":
    asyncio.run(main())
