"""What people were told on stderr."""

from dataclasses import dataclass

import pytest

from genserve.observe.log_lines import PREFIX


@dataclass
class Said:
    """What they were told so far, by this process and those that it has started."""

    capfd: pytest.CaptureFixture[str]
    _text: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        self._text += self.capfd.readouterr().err
        return self._text

    @property
    def lines(self) -> list[str]:
        """Those of genserve itself, without its name."""
        return [line.removeprefix(PREFIX) for line in self.text.splitlines() if line.startswith(PREFIX)]

    def count(self, words: str) -> int:
        """How often they were told this."""
        return self.text.count(words)
