"""Draws `genserve top` while a real model generates and takes pushes: the picture in the docs.

    scripts/screenshot                                                # a daemon on the built-in model
    python clients/python/top_screenshot.py --target HOST:PORT --model DIRECTORY --output top.svg

The daemon, the streams and the pushes (`genserve push`, in processes of their own) are real. The picture is taken at a
moment at which a push is being received; the pushes before it are in the history.
"""

import argparse
import asyncio
import re
import sys
import time
from contextlib import suppress
from pathlib import Path

import genserve
from genserve.cli.top.app import TopApp
from genserve.cli.top.feed import Pace
from genserve.cli.top.screen import Screen
from genserve.client import AsyncClient

PROMPTS = [f"Chapter {i}. Once upon a time, in a land far away," for i in range(1, 25)]
SIZE = (100, 30)
WARM_S = 20.0
"""Before the first push, so that there is a history."""
GAP_S = 12.0
NUM_BEFORE = 2
"""Pushes before the one in the picture."""
NUM_TRIES = 8
FONT_FACES = re.compile(r"@font-face \{[^}]*\}\s*")
"""They load fonts from another host; the picture names monospace as well."""


def main() -> int:
    """Writes the picture; 1 if no push was seen while it was received."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a running daemon; default: start one on the built-in model")
    parser.add_argument("--model", help="directory of the checkpoint that it serves; needed with --target")
    parser.add_argument("--output", type=Path, default=Path("docs/images/top.svg"), help="default: docs/images/top.svg")
    options = parser.parse_args()
    if (options.target is None) != (options.model is None):
        parser.error("--target and --model go together")
    picture = asyncio.run(draw(options.target, options.model))
    if picture is None:
        print("no push was seen while it was received", file=sys.stderr)
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(picture)
    print(options.output)
    return 0


async def draw(target: str | None, model: str | None) -> str | None:
    """The picture of a daemon, or of one that is started for it."""
    if target is not None and model is not None:
        return await drawn(target, model)
    async with genserve.launch(max_model_len=2048) as server:
        return await drawn(server.address, server.model)


async def drawn(target: str, model: str) -> str | None:
    """Draws the daemon at `target`, which serves the checkpoint in `model`."""
    async with AsyncClient(target) as client:
        app = TopApp(client, Screen(target, time.monotonic()), Pace(interval_s=0.1))
        streams = [asyncio.create_task(generate(client, prompt)) for prompt in PROMPTS]
        try:
            async with app.run_test(size=SIZE):
                await asyncio.sleep(WARM_S)
                version = (await client.get_weights()).weight_version
                for number in range(1, NUM_BEFORE + NUM_TRIES):
                    pushing = asyncio.create_task(push(target, model, version + number))
                    picture = await seen_receiving(app, pushing)
                    await pushing
                    if picture is not None and number > NUM_BEFORE:
                        return picture
                    await asyncio.sleep(GAP_S)
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    return None


async def generate(client: AsyncClient, prompt: str) -> None:
    """Streams without end."""
    while True:
        await client.generate(prompt, max_tokens=512, ignore_eos=True, temperature=1.0, timeout_s=None)


async def push(target: str, model: str, version: int) -> None:
    """`genserve push`, through gRPC alone: as from another host."""
    arguments = ["push", model, "--version", str(version), "--no-shared-memory"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "genserve", *arguments, "--target", target)
    if await process.wait() != 0:
        raise RuntimeError(f"genserve push has ended with status {process.returncode}")


async def seen_receiving(app: TopApp, pushing: "asyncio.Task[None]") -> str | None:
    """The screen at a moment at which a part of the push had arrived, as SVG; None if there was no such moment."""
    while not pushing.done():
        for transfer in app.state.transfers.shown:
            share = transfer.push.received_bytes / max(1, transfer.push.total_bytes)
            if transfer.push.state == "receiving" and 0.2 < share < 0.9 and len(transfer.points) > 1:
                app.draw()
                await asyncio.sleep(0)
                app.screen.refresh()
                return FONT_FACES.sub("", app.export_screenshot(title="genserve top"))
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(pushing), 0.02)
    return None


if __name__ == "__main__":
    sys.exit(main())
