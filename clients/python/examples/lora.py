"""A LoRA adapter, trained with PEFT on a text: the daemon learns to continue the text's beginning.

    genserve serve path/to/checkpoint --enable-lora
    pip install ".[push]" torch transformers peft
    python clients/python/examples/lora.py --model path/to/checkpoint

Only the adapter is pushed after a step. docs/lora.md says what a daemon takes.
"""

import argparse
import sys

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from genserve.client import Client
from genserve.errors import GenserveError

BEGINNING = "Once upon a time"
TEXT = f"{BEGINNING} there was a trainer who never had to wait for its rollouts."
NAME = "policy"


def push_adapter(client: Client, model: torch.nn.Module) -> int:
    """Later requests get the adapter as it is now; its version."""
    config = model.peft_config["default"].to_dict()
    return client.push_lora(NAME, get_peft_model_state_dict(model), config).push.weight_version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of the daemon")
    parser.add_argument("--model", required=True, help="the checkpoint that it serves: directory, or name on the hub")
    parser.add_argument("--steps", type=int, default=10, help="default: 10")
    options = parser.parse_args()
    with Client(options.target) as client:
        version = client.get_weights().weight_version + 1
        try:
            base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        except ValueError as error:  # its config.json names no model that transformers knows
            sys.exit(f"{type(error).__name__}: {error}")
        base.to("cuda" if torch.cuda.is_available() else "cpu")
        begun = client.push_weights(base, version=version)  # whatever was served: the adapter belongs to these
        print(f"version {version} is served, the daemon is {begun.state.phase}", flush=True)
        model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        optimiser = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-3)
        tokens = torch.tensor([client.tokenize(TEXT)], device=base.device)
        for step in range(1, options.steps + 1):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            lora_version = push_adapter(client, model)
            answer = client.generate(BEGINNING, max_tokens=16, temperature=0.0, lora_name=NAME)
            served = f"version {lora_version} of {NAME} is served: {answer.text!r}"
            print(f"step {step}: loss {loss.item():.3f}, {served}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (GenserveError, OSError) as error:  # no daemon, no such directory, or a model that it does not serve
        sys.exit(f"{type(error).__name__}: {error}")
