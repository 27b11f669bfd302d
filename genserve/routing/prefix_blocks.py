"""The prefix of a prompt as hashes: two prompts share a hash exactly as far as they share their beginning.

Blocks grow with their distance from the beginning, so that 64 of them reach as far as a long chat does, and one is
never longer than about a quarter of what precedes it. A tail that does not fill its block has no hash.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

MAX_BLOCKS: Final = 64
"""The most hashes that a prompt has. With blocks of 16 tokens they reach 21,760 tokens; with 64 bytes, 87,040 bytes."""
TOKENS_PER_BLOCK: Final = 16
"""Length of the first blocks in tokens: that of vLLM's blocks of KV cache, the least that two requests can share."""
BYTES_PER_BLOCK: Final = 64
"""Length of the first blocks of text in bytes: 16 tokens of English."""

# Lengths are 1, 4, 16 and 64 times that of the first blocks, 16 blocks each.
_BLOCKS_PER_LENGTH: Final = 16
_GROWTH: Final = 4
# BLAKE2b takes 40 us for 64 blocks of 16 tokens (AMD EPYC, Python 3.11) and CRC-32 25, but of 131,072 prefixes in an
# index, CRC-32 would find one by chance for every 500th prompt.
_DIGEST_BYTES: Final = 8
_BYTES_PER_TOKEN: Final = array("I").itemsize


def blocks_of_tokens(
    token_ids: Sequence[int], *, lora_name: str = "", cache_salt: str = "", block: int = TOKENS_PER_BLOCK
) -> tuple[bytes, ...]:
    """Returns the hashes of a prompt of token ids. `block` is the length of the first blocks in tokens.

    Prompts with different adapters or salts share no hash, as they share no KV cache. Raises OverflowError for a token
    id that is not in [0, 2**32).
    """
    data = array("I", token_ids[: _reach(block)]).tobytes()
    return tuple(_chained(data, block * _BYTES_PER_TOKEN, _root("tokens", lora_name, cache_salt)))


def blocks_of_text(
    text: str, *, lora_name: str = "", cache_salt: str = "", block: int = BYTES_PER_BLOCK
) -> tuple[bytes, ...]:
    """Returns the hashes of a prompt of text, which share none with those of token ids. `block` is the length of the
    first blocks in bytes of UTF-8."""
    reach = _reach(block)
    # Half of a surrogate pair has no UTF-8. It is for the daemon to refuse it.
    data = text[:reach].encode(errors="surrogatepass")[:reach]
    return tuple(_chained(data, block, _root("text", lora_name, cache_salt)))


def _reach(block: int) -> int:
    if block < 1:
        raise ValueError(f"block must be at least 1, is {block}")
    return sum(block * _GROWTH ** (index // _BLOCKS_PER_LENGTH) for index in range(MAX_BLOCKS))


def _root(kind: str, lora_name: str, cache_salt: str) -> bytes:
    return hashlib.blake2b(repr((kind, lora_name, cache_salt)).encode(), digest_size=_DIGEST_BYTES).digest()


def _chained(data: bytes, length: int, digest: bytes) -> Iterator[bytes]:
    blake2b = hashlib.blake2b
    start = 0
    for index in range(MAX_BLOCKS):
        if index and index % _BLOCKS_PER_LENGTH == 0:
            length *= _GROWTH
        end = start + length
        if end > len(data):
            return
        # Each digest covers that of the block before, hence all before.
        digest = blake2b(digest + data[start:end], digest_size=_DIGEST_BYTES).digest()
        yield digest
        start = end
