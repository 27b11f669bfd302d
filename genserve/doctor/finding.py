"""The result of one check of a start."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, as a line."""

    name: str
    is_ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok' if self.is_ok else 'failed':<7} {self.name:<10} {' '.join(self.text.split())}"
