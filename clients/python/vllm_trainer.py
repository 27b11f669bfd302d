"""A trainer that knows vLLM's weight-transfer API alone, updating the weights that a daemon serves.

    genserve serve DIRECTORY
    python clients/python/vllm_trainer.py --target HOST:PORT --model DIRECTORY --steps 3 --save TRAINED

One import says how the weights get there; the rest is vLLM's. With this one they are pushed. For vLLM's own backends it
would be NCCLTrainerInitInfo of vLLM, say, and GenserveWeightSyncClient of genserve.integrations.vllm_sync; see
docs/vllm_transfer.md.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

from genserve.integrations.vllm_trainer import GenserveTrainerInitInfo, GenserveWeightSyncClient


def main() -> None:
    """Sends the weights as they are, and after every step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051", help="where the daemon serves")
    parser.add_argument("--model", type=Path, required=True, help="directory of the checkpoint to train")
    parser.add_argument("--steps", type=int, default=1, help="how many steps to train")
    parser.add_argument("--save", type=Path, help="directory for the trained checkpoint")
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    client = GenserveWeightSyncClient(options.target)
    trainer = WeightTransferTrainerFactory.trainer_init(
        GenserveTrainerInitInfo(rank=0), client=client, source=ModuleSource(model)
    )
    trainer.send_weights()
    for step in range(options.steps):
        print(f"step {step}: loss {train(model, optimizer, seed=step):.3f}", flush=True)
        trainer.send_weights()
    trainer.shutdown()
    client.close()

    if options.save is not None:
        model.save_pretrained(options.save)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> float:
    """One step towards a line of random tokens, in the place of a loss that means something; the loss before it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.vocab_size, (1, 32), generator=generator)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    main()
