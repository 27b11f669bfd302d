"""Whether a daemon serves the policy that a model of transformers is, in float32."""

from collections.abc import Sequence
from typing import Any, Final

import torch

from genserve.client import AsyncClient

PROMPTS: Final[Sequence[list[int]]] = ([5, 6, 7, 8, 9, 10], [200, 3, 77], [42])
NUM_TOKENS: Final = 8
TOLERANCE: Final = 1e-3
"""Of a log-probability, as docs/training.md has it. A tensor that is stale by a tenth exceeds it a hundred times, but
for those that text does not reach."""


@torch.no_grad()
def perturb(model: Any, seed: int) -> None:
    """Changes every weight by a tenth of its tensor's root mean square."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        weight += 0.1 * weight.square().mean().sqrt() * torch.randn(weight.shape, generator=generator)


async def assert_same_policy(client: AsyncClient, model: Any, lora_name: str | None = None) -> None:
    """The daemon's greedy tokens are the model's, and their log-probabilities too."""
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 0}
    for prompt in PROMPTS:
        (answer,) = (await client.generate(prompt, lora_name=lora_name, **options)).sequences
        assert answer.logprobs is not None
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits
        own = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = own.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        difference = (expected - torch.tensor(answer.logprobs.sampled)).abs().max().item()
        assert difference < TOLERANCE, f"log-probabilities differ by {difference}"
        behind = (own.max(-1).values - expected).max().item()
        assert behind < TOLERANCE, f"a token is {behind} less likely than the model's greedy one"
