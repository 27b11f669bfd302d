"""GRPO: rollouts from a genserve daemon, a clipped policy gradient, and the new weights back into the daemon.

    python clients/python/grpo/train.py                 # rollouts and training take turns
    python clients/python/grpo/train.py --mode async    # the next rollouts run while the trainer trains

A transformer of random weights learns to answer a letter with words that begin with it. `--model` takes a checkpoint
that knows words already. README.md, beside this file, shows what comes out.
"""

import argparse
import asyncio
import csv
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from plot import draw
from tiny_model import LETTERS, make_tiny_model
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import genserve
from genserve.client import AsyncClient, Generation, PromptLike, PushResult
from genserve.launcher import Launch

MIN_WORDS = 8
"""A shorter answer is rewarded as if wrong words came up to here; else one right word would be as good as many."""


def flag(default: Any, text: str) -> Any:
    """A field of `Recipe`."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Recipe:
    """How it is trained; every field is a flag."""

    mode: str = flag("sync", "sync, or async: rollouts are one step ahead and run while the trainer trains")
    steps: int = flag(100, "number of rollouts, and of pushes")
    prompts: int = flag(16, "prompts of a step")
    samples: int = flag(8, "answers to a prompt, whose rewards are compared with each other")
    max_tokens: int = flag(16, "most tokens of an answer")
    minibatch: int = flag(64, "answers of an optimiser step")
    learning_rate: float = flag(3e-3, "of Adam")
    clip: float = flag(0.2, "how far from 1 a token's probability ratio may be moved")
    seed: int = flag(0, "of the tiny model, the prompts and the sampling")


class Samples(NamedTuple):
    """Prompts with their answers, padded on the right. Logprobs and versions lack the first token's column: no model
    predicts it."""

    tokens: Tensor  # int64 [sequences, tokens]
    logprobs: Tensor  # float32 [sequences, tokens - 1]: what the daemon says of each token that it sampled
    versions: Tensor  # int64 [sequences, tokens - 1]: of the weights that sampled it; -1 = it was not sampled

    @property
    def mask(self) -> Tensor:
        """bool [sequences, tokens - 1]: which tokens were sampled."""
        return self.versions >= 0


class Step(NamedTuple):
    """What a step came to: a line of the CSV."""

    step: int
    reward: float  # mean of the answers, in [0, 1]
    staleness: float  # mean over their tokens: versions from the one that sampled it to the one that is trained
    max_staleness: int
    mixed: float  # share of the answers that have tokens of two versions
    drift: float  # mean |log ratio| before the first optimiser step
    clipped: float  # share of the tokens that the clipping held back
    paused_ms: float  # generation stood still for the push
    kept: int  # requests that ran meanwhile, and went on
    seconds: float


async def train(
    client: AsyncClient,
    model: Any,
    prompts: Mapping[str, PromptLike],
    recipe: Recipe,
    report: Callable[[Step], None],
) -> None:
    """Trains `model`, a causal language model of transformers in float32, of which the daemon serves a copy.

    `prompts`: by the letter that they ask for. `report` is called after every step.
    """
    torch.manual_seed(recipe.seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=recipe.learning_rate)
    version = (await client.get_weights()).weight_version + 1
    await push(client, model, version)  # whatever was served: from here on both have the same weights
    async with asyncio.TaskGroup() as group:
        rollouts = group.create_task(roll_out(client, prompts, recipe, 1))
        for step in range(1, recipe.steps + 1):
            began_s = time.perf_counter()
            samples, rewards = await rollouts
            if recipe.mode == "async":
                # They begin under the version that is served now; the push below may reach them on their way.
                rollouts = group.create_task(roll_out(client, prompts, recipe, step + 1))
            # In a thread: the event loop has rollouts to receive.
            drift, clipped = await asyncio.to_thread(update, model, optimiser, samples, rewards, recipe)
            applied = (await push(client, model, version + 1)).applied
            if recipe.mode == "sync":
                rollouts = group.create_task(roll_out(client, prompts, recipe, step + 1))
            staleness = (version - samples.versions)[samples.mask]
            oldest = samples.versions.where(samples.mask, version).amin(1)
            report(
                Step(
                    step=step,
                    reward=rewards.mean().item(),
                    staleness=staleness.float().mean().item(),
                    max_staleness=int(staleness.max()),
                    mixed=(samples.versions.amax(1) > oldest).float().mean().item(),
                    drift=drift,
                    clipped=clipped,
                    paused_ms=1000 * applied.paused_s,
                    kept=applied.requests_kept,
                    seconds=time.perf_counter() - began_s,
                )
            )
            version += 1
        rollouts.cancel()  # nobody trains on them


async def roll_out(
    client: AsyncClient, prompts: Mapping[str, PromptLike], recipe: Recipe, step: int
) -> tuple[Samples, Tensor]:
    """Answers to some of the prompts, and their rewards: float32 [prompts, samples]."""
    chance = random.Random(f"{recipe.seed} {step}")
    letters = chance.choices(sorted(prompts), k=recipe.prompts)
    groups = await client.generate_many(
        [prompts[letter] for letter in letters],
        n=recipe.samples,
        max_tokens=recipe.max_tokens,
        logprobs=0,  # that of the sampled token, and no alternatives
        prompt_token_ids=True,
        seed=chance.getrandbits(32),
    )
    rewards = [
        [reward_of(letter, sequence.text) for sequence in group.sequences]
        for letter, group in zip(letters, groups, strict=True)
    ]
    return collate(groups), torch.tensor(rewards)


async def push(client: AsyncClient, model: Any, version: int) -> PushResult:
    """Gives the daemon the model's weights. What runs is frozen for the exchange and goes on under the new weights, by
    which its keys and values are computed anew: each log-probability is that of one version."""
    return await client.push_weights(model, version=version, pause_mode="keep", kv_policy="recompute")


def reward_of(letter: str, answer: str) -> float:
    """Share of the words that begin with the letter, in [0, 1]."""
    words = answer.lower().split()
    return sum(word.startswith(letter) for word in words) / max(len(words), MIN_WORDS)


def collate(groups: Sequence[Generation]) -> Samples:
    """The sequences of all prompts, below each other. They need `prompt_token_ids` and `logprobs`."""
    rows = [(group.prompt.token_ids, sequence) for group in groups for sequence in group.sequences]
    shape = (len(rows), max(len(prompt) + len(sequence.token_ids) for prompt, sequence in rows))
    tokens, logprobs, versions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), torch.full(shape, -1)
    for row, (prompt, sequence) in enumerate(rows):
        start, end = len(prompt), len(prompt) + len(sequence.token_ids)
        tokens[row, :end] = torch.tensor(prompt + sequence.token_ids)
        logprobs[row, start:end] = torch.tensor(sequence.logprobs.sampled)
        for span in sequence.weight_spans:
            versions[row, start + span.start : start + span.end] = span.version
    return Samples(tokens, logprobs[:, 1:], versions[:, 1:])


def logprobs_of(model: Any, tokens: Tensor) -> Tensor:
    """The model's log-probability of every token but the first, given those before it: float32, a column less.

    Padding on the right needs no mask: no token before it looks there.
    """
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def update(
    model: Any, optimiser: torch.optim.Optimizer, samples: Samples, rewards: Tensor, recipe: Recipe
) -> tuple[float, float]:
    """One pass over the samples: GRPO's advantages (Shao et al. 2024, 4.1.2) in PPO's clipped objective (Schulman et
    al. 2017, eq. 7). Gives the mean |log ratio| before the first optimiser step, and the share of clipped tokens."""
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    drifts, clipped = [], []
    for rows in torch.randperm(len(advantages)).split(recipe.minibatch):
        mask, advantage = samples.mask[rows], advantages[rows]
        # Over the daemon's own figure: that is the policy that sampled the token, whichever version it was.
        log_ratio = logprobs_of(model, samples.tokens[rows]) - samples.logprobs[rows]
        ratio = log_ratio.exp()
        free, limited = ratio * advantage, ratio.clamp(1 - recipe.clip, 1 + recipe.clip) * advantage
        loss = -torch.minimum(free, limited)[mask].mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        drifts.append(log_ratio[mask].abs().mean().item())
        clipped.append((limited < free)[mask].float().mean().item())
    return drifts[0], sum(clipped) / len(clipped)


def chat(letter: str) -> PromptLike:
    """What a model is asked that has learnt to chat. Any other gets the letter alone."""
    return [{"role": "user", "content": f"Write a sentence in which every word begins with the letter {letter}."}]


def own_daemon(model: str | None, dtype: str) -> Launch:
    """A small one, for those who have none running. `model`: a checkpoint's directory or its name on the hub; None is
    the built-in one. `dtype`: float32 or bfloat16."""
    return genserve.launch(model, dtype=dtype, max_model_len=512, kv_cache_memory_bytes=512 << 20)


async def main() -> None:
    """Trains; writes MODE.csv and MODE.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for each in fields(Recipe):
        name, text = each.name.replace("_", "-"), f"{each.metadata['help']} (default: {each.default})"
        parser.add_argument(f"--{name}", type=type(each.default), default=each.default, help=text)
    parser.add_argument("--model", help="a checkpoint's directory or its name on the hub; default: the tiny model")
    parser.add_argument("--address", help="HOST:PORT of a daemon that serves --model; default: start one")
    parser.add_argument("--dtype", default="float32", help="of the daemon that is started (default: float32)")
    parser.add_argument("--threads", type=int, default=1, help="of the trainer; the engine has its own (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("grpo-results"), help="directory (default: grpo-results)")
    args = parser.parse_args()
    if args.mode not in ("sync", "async"):
        parser.error("--mode is sync or async")
    if args.address is not None and args.model is None:
        parser.error("--address needs --model")
    recipe = Recipe(**{each.name: getattr(args, each.name) for each in fields(Recipe)})
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    steps: list[Step] = []

    async with AsyncExitStack() as stack:
        if args.model is None:
            args.model = stack.enter_context(TemporaryDirectory())
            make_tiny_model(Path(args.model), recipe.seed)
        if args.address is None:
            args.address = (await stack.enter_async_context(own_daemon(args.model, args.dtype))).address
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        chats = AutoTokenizer.from_pretrained(args.model).chat_template is not None
        prompts: dict[str, PromptLike] = {each: chat(each) if chats else each for each in LETTERS}
        client = await stack.enter_async_context(AsyncClient(args.address))
        lines = csv.writer(stack.enter_context((args.out / f"{recipe.mode}.csv").open("w", newline="", buffering=1)))
        lines.writerow(Step._fields)
        bar = stack.enter_context(tqdm(total=recipe.steps, unit="step"))

        def report(step: Step) -> None:
            steps.append(step)
            lines.writerow(step)
            bar.set_postfix(reward=f"{step.reward:.2f}", paused=f"{step.paused_ms:.0f} ms", refresh=False)
            bar.update()

        await train(client, model, prompts, recipe, report)

    if importlib.util.find_spec("matplotlib") is None:
        print(f"{args.out}: no picture, for matplotlib is not installed", file=sys.stderr)
    else:
        draw([step._asdict() for step in steps], f"GRPO, {recipe.mode}", args.out / f"{recipe.mode}.png")


if __name__ == "__main__":
    asyncio.run(main())
