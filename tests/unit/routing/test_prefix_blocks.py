"""Two prompts share hashes exactly as far as they share their beginning."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genserve.routing.prefix_blocks import (
    BYTES_PER_BLOCK,
    MAX_BLOCKS,
    TOKENS_PER_BLOCK,
    blocks_of_text,
    blocks_of_tokens,
)
from tests.unit.routing.fleets import UNTIMED

LENGTHS = [16 * 4 ** (index // 16) for index in range(MAX_BLOCKS)]
"""Of the blocks of tokens."""
ENDS = [sum(LENGTHS[: index + 1]) for index in range(MAX_BLOCKS)]


def num_shared(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    """How many hashes are equal from the beginning; the others must have none in common."""
    shared = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert not set(one[shared:]) & set(other[shared:])
    return shared


@UNTIMED
@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 3000))
def test_prompts_share_the_blocks_that_end_before_they_part(one: int, other: int, parted: int) -> None:
    """Two prompts of these lengths that differ from one token on."""
    first = list(range(one))
    second = [token if token < parted else token + 1 for token in range(other)]
    same = min(one, other, parted)
    blocks, others = blocks_of_tokens(first), blocks_of_tokens(second)
    assert len(blocks) == sum(end <= one for end in ENDS)
    assert num_shared(blocks, others) == sum(end <= same for end in ENDS)


def test_equal_blocks_after_different_ones_have_different_hashes() -> None:
    """A hash covers all that precedes it."""
    assert not set(blocks_of_tokens([1] * 16 + [3] * 32)) & set(blocks_of_tokens([2] * 16 + [3] * 32))


def test_a_long_prompt_has_64_blocks_and_what_is_behind_them_costs_nothing() -> None:
    """They reach 21,760 tokens."""
    reach = [7] * ENDS[-1]
    assert ENDS[-1] == 21_760
    assert len(blocks_of_tokens(reach)) == MAX_BLOCKS
    # -1 is no token id, and would be refused if it were read.
    assert blocks_of_tokens([*reach, -1]) == blocks_of_tokens(reach)
    assert len(blocks_of_text("x" * 100_000)) == MAX_BLOCKS


def test_no_block_is_longer_than_a_quarter_of_what_precedes_it() -> None:
    """After the first few, so that a session's own part of the prompt is told apart early."""
    assert all(LENGTHS[index] <= ENDS[index - 1] / 4 for index in range(4, MAX_BLOCKS))


def test_text_is_hashed_in_blocks_of_its_bytes() -> None:
    """Not of its characters."""
    assert len(blocks_of_text("x" * (BYTES_PER_BLOCK - 1))) == 0
    assert len(blocks_of_text("x" * BYTES_PER_BLOCK)) == 1
    assert len(blocks_of_text("ü" * (BYTES_PER_BLOCK // 2))) == 1
    assert num_shared(blocks_of_text("x" * 200 + "a" * 200), blocks_of_text("x" * 200 + "b" * 200)) == 3
    assert len(blocks_of_text("\ud800" * BYTES_PER_BLOCK)) == 3, "half of a surrogate pair"


@pytest.mark.parametrize("other", [{"lora_name": "l"}, {"cache_salt": "l"}, {"lora_name": "l", "cache_salt": "m"}])
def test_prompts_that_share_no_kv_cache_share_no_hash(other: dict[str, Any]) -> None:
    """Adapters and salts."""
    tokens, text = list(range(100)), "x" * 500
    assert num_shared(blocks_of_tokens(tokens), blocks_of_tokens(tokens, **other)) == 0
    assert num_shared(blocks_of_text(text), blocks_of_text(text, **other)) == 0
    assert num_shared(blocks_of_tokens(tokens, **other), blocks_of_tokens(tokens, lora_name="", cache_salt="x")) == 0


def test_a_salt_is_not_mistaken_for_an_adapter() -> None:
    """Nor a border between them for another."""
    tokens = list(range(32))
    kinds: list[dict[str, Any]] = [{"lora_name": "l"}, {"cache_salt": "l"}, {"lora_name": "a", "cache_salt": "bc"}]
    kinds.append({"lora_name": "ab", "cache_salt": "c"})
    assert len({blocks_of_tokens(tokens, **kind) for kind in kinds}) == len(kinds)


def test_hashes_are_the_same_in_every_process() -> None:
    """So that the statistics of two routers can be compared."""
    assert [each.hex() for each in blocks_of_tokens(range(TOKENS_PER_BLOCK))] == ["10b2d8416941967a"]


def test_the_first_length_can_be_chosen() -> None:
    """For an engine with another block size."""
    assert len(blocks_of_tokens(range(64), block=32)) == 2
    assert len(blocks_of_text("x" * 64, block=16)) == 4
    assert len(blocks_of_tokens(range(3), block=1)) == 3
    with pytest.raises(ValueError, match="block"):
        blocks_of_tokens(range(64), block=0)


def test_what_is_no_token_id_is_refused() -> None:
    """It would be the hash of another token."""
    for wrong in (-1, 1 << 32):
        with pytest.raises(OverflowError):
            blocks_of_tokens([wrong] * 16)
