"""FSDP under torchrun: every rank asks for answers, trains on the best of them, and pushes its part of the weights.

    genserve serve path/to/checkpoint
    pip install ".[push]" torch transformers
    torchrun --standalone --nproc-per-node 2 clients/python/examples/fsdp.py --model path/to/checkpoint

On GPUs each rank needs one of its own. docs/trainers.md says what a rank sends, and what happens when one dies.
"""

import argparse
import sys
import uuid

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from genserve.client import Client
from genserve.errors import GenserveError

PROMPTS = ["Once upon a time", "The sea", "My favourite food is", "In the morning"]


def reward_of(text: str) -> float:
    """Put your own here. This one is the share of the letter e."""
    return text.count("e") / max(len(text), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of the daemon")
    parser.add_argument("--model", required=True, help="the checkpoint that it serves: directory, or name on the hub")
    parser.add_argument("--steps", type=int, default=10, help="default: 10")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
    with Client(options.target) as client:
        agreed = [client.get_weights().weight_version + 1, str(uuid.uuid4())]
        try:
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        except ValueError as error:  # its config.json names no model that transformers knows
            sys.exit(f"{type(error).__name__}: {error}")
        dist.init_process_group()
        for layer in [each for each in model.modules() if type(each).__name__ in (model._no_split_modules or ())]:
            fully_shard(layer)
        fully_shard(model)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)
        dist.broadcast_object_list(agreed)  # rank 0's: all push the same versions, under the same ids
        version, run = agreed
        # From here on both have the same weights.
        begun = client.push_weights(model, version=version, push_id=f"{run}-{version}", attempt=run)
        if dist.get_rank() == 0:
            print(f"version {version} is served, the daemon is {begun.state.phase}", flush=True)
        prompt = PROMPTS[dist.get_rank() % len(PROMPTS)]
        for step in range(1, options.steps + 1):
            answers = client.generate(prompt, n=8, max_tokens=32, prompt_token_ids=True, min_weight_version=version)
            rewards = torch.tensor([reward_of(answer.text) for answer in answers.sequences], device=model.device)
            best = answers.sequences[rewards.argmax()]
            tokens = torch.tensor([answers.prompt.token_ids + best.token_ids], device=model.device)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            version += 1
            client.push_weights(model, version=version, push_id=f"{run}-{version}", attempt=run)
            dist.all_reduce(rewards)
            if dist.get_rank() == 0:
                reward = rewards.mean() / dist.get_world_size()
                print(f"step {step}: reward {reward:.3f}, version {version} is served", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (GenserveError, OSError) as error:  # no daemon, no such directory, or a model that it does not serve
        sys.exit(f"{type(error).__name__}: {error}")
