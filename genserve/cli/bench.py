"""`genserve bench`: measures a running daemon from the machine where the command runs. Does not change the weights."""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from genserve.cli.options import (
    Subparsers,
    add_connection_options,
    add_timeout,
    count,
    counts,
    default_holder,
    open_async_client,
    open_client,
)

if TYPE_CHECKING:
    from genserve.client import AsyncClient, Delta, GenerateOptions

_ROUNDS: Final = 5
_REQUESTS_PER_SLOT: Final = 4
_LEASE_S: Final = 5.0  # the pause expires this soon if the command is killed while it holds it
_STAGING_TTL_S: Final = 10.0  # the same for staged bytes


def add_parser(subparsers: "Subparsers[argparse.ArgumentParser]") -> None:
    """Adds the command and its three measurements."""
    parser = subparsers.add_parser(
        "bench", help="measure a running daemon", description="Measures a running daemon from this machine."
    )
    measurements = parser.add_subparsers(title="measurements", metavar="MEASUREMENT", dest="measurement", required=True)

    generate = measurements.add_parser(
        "generate",
        help="tokens per second and latency by concurrency",
        description="Streams greedy answers to random prompts. A slot starts a request when its previous one ends.",
    )
    generate.add_argument("--concurrency", type=counts, default=[1, 16, 64], metavar="N,N", help="default: 1,16,64")
    generate.add_argument(
        "--max-tokens", type=count, default=64, metavar="N", help="output tokens per request (default: 64)"
    )
    generate.add_argument(
        "--prompt-tokens", type=count, default=5, metavar="N", help="tokens of each prompt (default: 5)"
    )
    generate.add_argument(
        "--requests",
        type=count,
        metavar="N",
        help=f"requests at each concurrency (default: {_REQUESTS_PER_SLOT} per slot)",
    )
    generate.add_argument(
        "--logprobs", type=int, metavar="N", help="log-probability of each token, and of N alternatives"
    )
    generate.add_argument("--text", action="store_true", help="text as well as token ids")
    generate.add_argument("--many", action="store_true", help="all requests over one GenerateMany call")

    push = measurements.add_parser(
        "push",
        help="speed of receiving weights",
        description="Stages weights and discards them. The served weights do not change.",
    )
    push.add_argument("path", metavar="WEIGHTS", help="a .safetensors file or a checkpoint directory")
    push.add_argument("--streams", type=count, default=1, metavar="N", help="number of parallel streams (default: 1)")

    pause = measurements.add_parser(
        "pause",
        help="latency of pause and resume",
        description="Pauses and resumes. Generation stops for moments.",
    )
    for each in (push, pause):
        each.add_argument("--rounds", type=count, default=_ROUNDS, metavar="N", help=f"default: {_ROUNDS}")
    for each in (generate, push, pause):
        add_timeout(each, what="timeout of each call")
        each.add_argument("--json", action="store_true", help="print one line of JSON")
        add_connection_options(each)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, and prints a table or JSON: also of what was measured before an error."""
    measure = {"generate": _generate, "push": _push, "pause": _pause}[args.measurement]
    rows: list[dict[str, Any]] = []
    try:
        measure(args, rows)
    finally:
        if rows and args.json:
            print(json.dumps({"measurement": args.measurement, "rows": rows}), flush=True)
        elif rows:
            print(table(rows), flush=True)
    return 0


@dataclass(slots=True)
class StreamTimes:
    """When a request was sent, and when each of its messages with tokens came; seconds of one monotonic clock."""

    sent_at: float
    arrived_at: list[float] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationFigures:
    """The figures of all streams at one concurrency. `inter_token` is the time between two messages of a stream."""

    concurrency: int
    requests: int
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float
    client_cpu_us_per_token: float

    @classmethod
    def of(cls, concurrency: int, streams: Sequence[StreamTimes], client_cpu_s: float) -> "GenerationFigures":
        """Computes them from streams that each received at least one token, and the CPU time of this process."""
        num_tokens = sum(stream.num_tokens for stream in streams)
        first_s = [stream.arrived_at[0] - stream.sent_at for stream in streams]
        waits_s = [wait_s for stream in streams for wait_s in _differences(stream.arrived_at)]
        elapsed_s = max(stream.arrived_at[-1] for stream in streams) - min(stream.sent_at for stream in streams)
        return cls(
            concurrency=concurrency,
            requests=len(streams),
            tokens_per_s=num_tokens / elapsed_s,
            ttft_p50_ms=1000 * percentile(first_s, 0.5),
            ttft_p99_ms=1000 * percentile(first_s, 0.99),
            inter_token_p50_ms=1000 * percentile(waits_s, 0.5),
            inter_token_p99_ms=1000 * percentile(waits_s, 0.99),
            client_cpu_us_per_token=1e6 * client_cpu_s / num_tokens,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank). 0 if there are no values."""
    if not values:
        return 0.0
    rank = -int(-share * len(values) // 1)  # rounded up
    return sorted(values)[max(rank, 1) - 1]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of the same keys as aligned columns; figures to four digits."""
    lines = [[key.replace("_", " ") for key in rows[0]]]
    lines += [[_figure(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _figure(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:#.4g}".rstrip(".")


def _differences(moments: Sequence[float]) -> Iterator[float]:
    return (later - earlier for earlier, later in itertools.pairwise(moments))


def _generate(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    asyncio.run(_generate_all(args, rows))


async def _generate_all(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    async with open_async_client(args) as client:
        vocab_size = (await client.server_info()).vocab_size
        # A new seed each time, so that the daemon's prefix cache has nothing from the last run.
        prompts = _prompts(random.Random(), vocab_size, args.prompt_tokens)
        await _stream(client, next(prompts), args)  # warms up
        for concurrency in args.concurrency:
            num_requests = args.requests if args.requests is not None else _REQUESTS_PER_SLOT * concurrency
            began_at_s = time.process_time()
            run = _over_one_call if args.many else _closed_loop
            streams = await run(client, prompts, concurrency, num_requests, args)
            cpu_s = time.process_time() - began_at_s
            rows.append(asdict(GenerationFigures.of(concurrency, streams, cpu_s)))


def _prompts(generator: random.Random, vocab_size: int, num_tokens: int) -> Iterator[list[int]]:
    while True:
        yield [generator.randrange(vocab_size) for _ in range(num_tokens)]


async def _closed_loop(
    client: "AsyncClient", prompts: Iterator[list[int]], concurrency: int, num_requests: int, args: argparse.Namespace
) -> list[StreamTimes]:
    """`num_requests` requests, `concurrency` of them at a time."""
    streams: list[StreamTimes] = []
    left = iter(range(num_requests))

    async def slot() -> None:
        for _ in left:
            streams.append(await _stream(client, next(prompts), args))

    tasks = [asyncio.create_task(slot()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return streams


async def _over_one_call(
    client: "AsyncClient", prompts: Iterator[list[int]], concurrency: int, num_requests: int, args: argparse.Namespace
) -> list[StreamTimes]:
    """The same over one GenerateMany call."""
    streams: dict[str, StreamTimes] = {}
    async with client.stream_many(timeout_s=args.timeout) as many:

        async def submit() -> None:
            times = StreamTimes(time.monotonic())
            streams[await many.submit(next(prompts), **_options(args))] = times
            if len(streams) == num_requests:
                await many.done()

        for _ in range(min(concurrency, num_requests)):
            await submit()
        async for item in many:
            if item.delta is None:
                raise item.error or RuntimeError("an item has neither a delta nor an error")
            _count(streams[item.request_id], item.delta)
            if item.is_last:
                _check(streams[item.request_id])
                if len(streams) < num_requests:
                    await submit()
    return list(streams.values())


async def _stream(client: "AsyncClient", prompt: list[int], args: argparse.Namespace) -> StreamTimes:
    times = StreamTimes(time.monotonic())
    async with client.stream(prompt, timeout_s=args.timeout, **_options(args)) as deltas:
        async for delta in deltas:
            _count(times, delta)
    _check(times)
    return times


def _options(args: argparse.Namespace) -> "GenerateOptions":
    return {
        "max_tokens": args.max_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "text": args.text,
        "logprobs": args.logprobs,
    }


def _count(times: StreamTimes, delta: "Delta") -> None:
    """Reads the fields that the benchmark asked for, as a client would."""
    num_tokens = 0
    for output in delta.outputs:
        num_tokens += len(output.token_ids)
        _ = output.text, output.logprobs
    if num_tokens:
        times.arrived_at.append(time.monotonic())
        times.num_tokens += num_tokens


def _check(times: StreamTimes) -> None:
    from genserve.errors import GenserveError

    if times.num_tokens == 0:
        raise GenserveError("a request ended without a token: was it aborted?")


def _push(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    from genserve.errors import InvalidFieldError

    durations_s = []
    with open_client(args) as client:
        version = client.get_weights().weight_version + 1
        total_bytes = 0
        for _ in range(args.rounds + 1):
            push_id = str(uuid.uuid4())
            started_at = time.monotonic()
            try:
                result = client.push_weights(
                    Path(args.path),
                    version=version,
                    push_id=push_id,
                    action="stage",
                    streams=args.streams,
                    staging_ttl_s=_STAGING_TTL_S,
                    timeout_s=args.timeout,
                )
            except ValueError as error:  # the file is not what it claims to be
                raise InvalidFieldError(str(error)) from error
            durations_s.append(time.monotonic() - started_at)
            client.discard_push(push_id)
            total_bytes = result.push.total_bytes
    durations_s = durations_s[1:]  # the first one warms up
    rows.append(
        {
            "streams": args.streams,
            "rounds": args.rounds,
            "GB": total_bytes / 1e9,
            "median_s": median(durations_s),
            "GB_per_s": total_bytes / 1e9 / median(durations_s),
            "best_GB_per_s": total_bytes / 1e9 / min(durations_s),
            "worst_GB_per_s": total_bytes / 1e9 / max(durations_s),
        }
    )


def _pause(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    from genserve.errors import PauseLeaseLostError

    pauses_s, resumes_s = [], []
    with open_client(args) as client:
        for _ in range(args.rounds + 1):
            began_at = time.monotonic()
            lease = client.pause(holder=default_holder(), ttl_s=_LEASE_S, timeout_s=args.timeout).lease
            paused_at = time.monotonic()
            try:
                client.resume(lease.lease_id)
            except KeyboardInterrupt:
                # The call was cancelled, and may or may not have reached the daemon.
                with contextlib.suppress(PauseLeaseLostError):
                    client.resume(lease.lease_id)
                raise
            pauses_s.append(paused_at - began_at)
            resumes_s.append(time.monotonic() - paused_at)
    rows.append(
        {
            "rounds": args.rounds,
            "pause_p50_ms": 1000 * percentile(pauses_s[1:], 0.5),
            "pause_max_ms": 1000 * max(pauses_s[1:]),
            "resume_p50_ms": 1000 * percentile(resumes_s[1:], 0.5),
            "resume_max_ms": 1000 * max(resumes_s[1:]),
        }
    )
