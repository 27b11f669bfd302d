"""How far the daemon's log-probabilities lie from the trainer's own, after each of some pushes.

    python clients/python/grpo/fidelity.py                                         # the built-in model, both types
    python clients/python/grpo/fidelity.py --model DIRECTORY --dtypes bfloat16

An importance ratio is the trainer's probability of a token over the daemon's. Under the same weights it should be 1;
what is left is rounding, or a fault, as a tensor that was not pushed. Prints a table, and exits with 1 if a line is
beyond its tolerance.
"""

import argparse
import asyncio
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from train import collate, logprobs_of, own_daemon, push
from transformers import AutoModelForCausalLM

from genserve.client import AsyncClient, PromptLike

PROMPTS = [f"Chapter {number}. Once upon a time, in a land far away," for number in range(1, 17)]
RATIO_EDGES = (0.9, 0.99, 0.999, 1.001, 1.01, 1.1)
NOISE = 0.01
"""Of the change between two pushes, relative to each tensor's root mean square."""


@dataclass(frozen=True)
class Tolerance:
    """Limits for |trainer's - daemon's log-probability|, natural logarithms."""

    max: float
    mean: float


TOLERANCES = {"float32": Tolerance(max=1e-3, mean=1e-4), "bfloat16": Tolerance(max=0.5, mean=0.06)}
"""By the type that the daemon computes in."""


@dataclass(frozen=True)
class Fidelity:
    """`differences`, float32 [tokens]: the trainer's log-probability of each sampled token less the daemon's."""

    differences: Tensor

    @property
    def max(self) -> float:
        """The largest difference."""
        return self.differences.abs().max().item()

    @property
    def mean(self) -> float:
        """The mean difference, regardless of the sign."""
        return self.differences.abs().mean().item()

    def is_within(self, tolerance: Tolerance) -> bool:
        """Whether the two compute the same, but for rounding. NaN is not."""
        return self.max <= tolerance.max and self.mean <= tolerance.mean

    def ratio_shares(self) -> list[float]:
        """The histogram of the importance ratios: shares of the tokens below, between and above `RATIO_EDGES`."""
        bins = torch.bucketize(self.differences.exp(), torch.tensor(RATIO_EDGES))
        return (bins.bincount(minlength=len(RATIO_EDGES) + 1) / len(bins)).tolist()


async def compare(
    client: AsyncClient, models: Sequence[Any], prompts: Sequence[PromptLike] = PROMPTS, max_tokens: int = 32
) -> list[Fidelity]:
    """Has the daemon sample four answers to each prompt, and each of the trainer's models compute their tokens'
    log-probabilities."""
    groups = await client.generate_many(prompts, n=4, max_tokens=max_tokens, logprobs=0, prompt_token_ids=True, seed=0)
    samples = collate(groups)
    return [Fidelity((own_logprobs(model, samples.tokens) - samples.logprobs)[samples.mask]) for model in models]


@torch.no_grad()
def own_logprobs(model: Any, tokens: Tensor) -> Tensor:
    """As `logprobs_of`, a few sequences at a time: the logits of a large vocabulary take memory."""
    return torch.cat([logprobs_of(model, rows) for rows in tokens.split(8)])


@torch.no_grad()
def disturb(model: Any, seed: int) -> None:
    """Changes every weight a little, as training does."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight += NOISE * weight.square().mean().sqrt() * torch.randn(weight.shape, generator=generator)


async def table(model_name: str | None, dtype: str, num_pushes: int) -> bool:
    """Prints the lines of a daemon of one type; whether all of them are within the tolerance."""
    all_within = True
    async with own_daemon(model_name, dtype) as server:
        client = server.client
        model = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
        for version in range(1, num_pushes + 1):
            disturb(model, seed=version)
            await push(client, model, version)
            models = {"float32": model}
            if dtype != "float32":
                models[dtype] = copy.deepcopy(model).to(getattr(torch, dtype))
            found = await compare(client, list(models.values()))
            for own_dtype, fidelity in zip(models, found, strict=True):
                within = fidelity.is_within(TOLERANCES[dtype])
                all_within &= within
                shares = " | ".join(f"{100 * share:.1f}" for share in fidelity.ratio_shares())
                figures = f"{len(fidelity.differences)} | {fidelity.max:.1e} | {fidelity.mean:.1e} | {shares}"
                print(f"| {dtype} | {own_dtype} | {version} | {figures} | {'yes' if within else 'NO'} |", flush=True)
    return all_within


async def main() -> int:
    """Prints the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's directory or its name on the hub; default: the built-in model")
    parser.add_argument("--dtypes", nargs="+", default=list(TOLERANCES), choices=list(TOLERANCES), help="of the daemon")
    parser.add_argument("--pushes", type=int, default=3, help="default: 3")
    args = parser.parse_args()
    edges = [f"ratio < {RATIO_EDGES[0]}, %", *(f"< {edge}" for edge in RATIO_EDGES[1:]), "above"]
    heads = ["daemon", "trainer", "push", "tokens", "max", "mean", *edges, "within"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    return 0 if all([await table(args.model, dtype, args.pushes) for dtype in args.dtypes]) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
