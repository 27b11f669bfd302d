"""A model that is small enough to learn from nothing on a CPU."""

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LETTERS = string.ascii_lowercase
_END = "<end>"


def make_tiny_model(directory: Path, seed: int) -> None:
    """Writes a checkpoint of 0.1 M random float32 weights, whose words are the letters."""
    torch.manual_seed(seed)
    words = {word: number for number, word in enumerate([*LETTERS, _END])}
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        initializer_range=0.1,
        eos_token_id=words[_END],
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    tokenizer = Tokenizer(WordLevel(words, unk_token=_END))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END).save_pretrained(directory)
