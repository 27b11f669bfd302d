"""The tokenizer of a tiny model."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.models import tiny_qwen3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny_qwen3(tmp_path_factory.mktemp("tiny")))
