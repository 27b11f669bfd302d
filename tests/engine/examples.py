"""The code blocks of pages, which are run as they stand."""

import re
from pathlib import Path

WRITTEN_ADDRESS = "127.0.0.1:50051"


def block(language: str, containing: str, page: Path) -> str:
    """The one code block of a language that contains a word."""
    blocks = re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    found = [text for text in blocks if containing in text]
    assert len(found) == 1
    return found[0]
