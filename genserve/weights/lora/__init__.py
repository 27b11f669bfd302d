"""LoRA adapters: read, checked, and loaded without a push of the whole model."""
