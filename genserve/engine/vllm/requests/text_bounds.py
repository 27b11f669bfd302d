"""How few tokens a text can have, from the vocabulary alone: a text that cannot fit is refused before it is tokenised.

The bound: a token of L bytes covers L bytes of the text, each of which occurs in some token of at least L bytes. So, if
longest[b] is the length of the longest token that holds byte b, the reciprocals of the bytes that a token covers add up
to at most 1, and those of the whole text to at most its number of tokens. It holds where every byte ends up in a token:
for byte-level BPE and for vocabularies with byte fallback, unless something before the model drops text. Special tokens
are long, and rare: what those that occur may cover is taken off instead.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_KEPT_BY_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})
_WHITESPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f"
    "\u205f\u3000"
)
# The last character of a special token may combine with the following one, if text is composed.
_SEAM_BYTES = 3
_MARK = "\u2581"  # how sentencepiece writes a space


@dataclass(frozen=True, slots=True)
class TextBounds:
    """`longest`: for each byte the length, in bytes, of the longest token that contains it; 0 if unknown."""

    longest: tuple[int, ...]
    added: tuple[str, ...]
    """Texts of the tokens that were added to the vocabulary, which are matched literally."""
    composes: bool
    """Whether the tokenizer first converts text to Unicode's normal form C."""

    def least_tokens(self, text: str) -> float:
        """A lower bound of the number of tokens of `text`, up to rounding."""
        covered = sum(text.count(each) * (self._weight(each) + _SEAM_BYTES) for each in self.added if each in text)
        return self._weight(unicodedata.normalize("NFC", text) if self.composes else text) - covered

    def _weight(self, text: str) -> float:
        data = text.encode(errors="replace")
        return sum(data.count(byte) / length for byte, length in enumerate(self.longest) if length)


def text_bounds(tokenizer: Any) -> TextBounds | None:
    """The bounds of a Hugging Face tokenizer; None if the vocabulary does not limit what a token can stand for."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else bounds_of(json.loads(backend.to_str()))


def bounds_of(described: Mapping[str, Any]) -> TextBounds | None:
    """The same from the contents of a tokenizer.json."""
    model = described["model"]
    pre_tokenizers = list(_parts(described.get("pre_tokenizer"), "pretokenizers"))
    normalizers = list(_parts(described.get("normalizer"), "normalizers"))
    byte_level = any(each["type"] == "ByteLevel" for each in pre_tokenizers)
    if model.get("type") != "BPE" or not (byte_level or model.get("byte_fallback")):
        return None
    if not all(map(_keeps_text, pre_tokenizers)) or not all(map(_only_grows, normalizers)):
        return None
    added_tokens = described.get("added_tokens") or ()
    found_first = {added["content"] for added in added_tokens if not added.get("single_word")}
    longest = [0] * 256
    for token in model["vocab"].keys() - found_first:
        _note(longest, _bytes_of(token, byte_level))
    if any(added.get("lstrip") or added.get("rstrip") for added in added_tokens):
        for byte in _WHITESPACE.encode():  # such a token includes any amount of whitespace
            longest[byte] = 0
    added_texts = tuple(added["content"] for added in added_tokens if added["content"])
    return TextBounds(tuple(longest), added_texts, any(each["type"] == "NFC" for each in normalizers))


def _parts(part: Mapping[str, Any] | None, members: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for each in part[members]:
            yield from _parts(each, members)
    else:
        yield part


def _keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    return pre_tokenizer["type"] in _KEPT_BY_PRE_TOKENIZERS and pre_tokenizer.get("behavior") != "Removed"


def _only_grows(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        return bool(normalizer["pattern"] == {"String": " "} and normalizer["content"] == _MARK)
    return normalizer["type"] in ("NFC", "Prepend")


def _bytes_of(token: str, byte_level: bool) -> bytes:
    """The text that a token of the vocabulary stands for."""
    if byte_level:
        return bytes(_BYTE_OF.get(character, 0) for character in token)
    if len(token) == 6 and token.startswith("<0x"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_MARK, " ").encode()


def _note(longest: list[int], token: bytes) -> None:
    for byte in set(token):
        longest[byte] = max(longest[byte], len(token))


def _byte_characters() -> dict[str, int]:
    """How byte-level BPE writes bytes: those that print as themselves, the others from U+0100 on (GPT-2's table)."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
