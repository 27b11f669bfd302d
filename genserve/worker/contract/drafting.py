"""Whether pushes contain the weights of the draft model: read from a VllmConfig. The daemon refuses and warns by it."""

from typing import Any


def drafts_with_served_checkpoint(config: Any) -> bool:
    """Whether the draft model's weights are in the served checkpoint, and so in every complete push: layers for
    multi-token prediction (MTP). `config`: a VllmConfig, or an object with its fields."""
    speculative = config.speculative_config
    if speculative is None or speculative.method != "mtp" or speculative.draft_model_config is None:
        return False
    return bool(speculative.draft_model_config.model == config.model_config.model)
