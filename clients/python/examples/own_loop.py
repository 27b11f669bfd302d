"""A training loop of your own, as docs/training.md explains it: generate groups of answers, compute GRPO's loss, step,
push.

    genserve serve path/to/checkpoint
    pip install ".[push]" torch transformers
    python clients/python/examples/own_loop.py --model path/to/checkpoint
"""

import argparse
import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from genserve.client import Client, Generation
from genserve.errors import GenserveError

PROMPTS = ["Once upon a time", "The sea", "My favourite food is", "In the morning"]


def reward_of(text: str) -> float:
    """Put your own here. This one is the share of the letter e."""
    return text.count("e") / max(len(text), 1)


def loss_of(model: torch.nn.Module, groups: list[Generation], rewards: torch.Tensor) -> torch.Tensor:
    """PPO's clipped loss. An answer's advantage compares its reward with the others of its group."""
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    answers = [(group.prompt.token_ids, answer) for group in groups for answer in group.sequences]
    rows = [torch.tensor(prompt + answer.token_ids) for prompt, answer in answers]
    # What the daemon says of each token that it sampled. The prompt's and the padding's are NaN.
    known = [torch.tensor([torch.nan] * (len(prompt) - 1) + answer.logprobs.sampled) for prompt, answer in answers]
    tokens = pad_sequence(rows, batch_first=True).to(model.device)
    sampled = pad_sequence(known, batch_first=True, padding_value=torch.nan).to(model.device)
    predicted = model(input_ids=tokens[:, :-1]).logits.float().log_softmax(-1)
    logprobs = predicted.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    mask = ~sampled.isnan()
    ratio = (logprobs[mask] - sampled[mask]).exp()
    advantage = advantages.to(model.device)[:, None].expand_as(sampled)[mask]
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of the daemon")
    parser.add_argument("--model", required=True, help="the checkpoint that it serves: directory, or name on the hub")
    parser.add_argument("--steps", type=int, default=10, help="default: 10")
    options = parser.parse_args()
    with Client(options.target) as client:
        version = client.get_weights().weight_version + 1
        try:
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        except ValueError as error:  # its config.json names no model that transformers knows
            sys.exit(f"{type(error).__name__}: {error}")
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
        begun = client.push_weights(model, version=version)  # whatever was served: from here on both have these weights
        print(f"version {version} is served, the daemon is {begun.state.phase}", flush=True)
        for step in range(1, options.steps + 1):
            groups = client.generate_many(PROMPTS, n=8, max_tokens=32, logprobs=0, prompt_token_ids=True)
            rewards = torch.tensor([[reward_of(answer.text) for answer in group.sequences] for group in groups])
            loss_of(model, groups, rewards).backward()
            optimiser.step()
            optimiser.zero_grad()
            version = client.push_weights(model, version=version + 1).applied.active_version
            print(f"step {step}: reward {rewards.mean():.3f}, version {version} is served", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (GenserveError, OSError) as error:  # no daemon, no such directory, or a model that it does not serve
        sys.exit(f"{type(error).__name__}: {error}")
