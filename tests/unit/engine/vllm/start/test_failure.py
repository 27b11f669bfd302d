"""What a daemon says when its engine's processes could not start."""

import json
import logging
import logging.config
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from genserve.engine.vllm.start.failure import EngineStartError, ReportHandler, explained

CONFIG = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"vllm": {"class": "logging.NullHandler"}},
    "loggers": {"vllm": {"handlers": ["vllm"], "level": "ERROR", "propagate": False}},
}


class Validation(ValueError):
    """As pydantic's: its text is many lines, of which the last is an address."""

    def errors(self) -> list[dict[str, Any]]:
        """As pydantic's."""
        return [{"msg": "Value error, a must be even"}, {"msg": "b must be odd"}]


def configure(path: str) -> None:
    """As vLLM does in each of its processes."""
    logging.config.dictConfig(json.loads(Path(path).read_text()))


def log(message: str, error: Exception) -> None:
    """As vLLM's processes log what ends them."""
    logger = logging.getLogger("vllm.v1.engine.core")
    try:
        raise error
    except Exception:
        logger.exception(message)


def failing_start(logged: Sequence[tuple[str, Exception]]) -> None:
    """Processes log that, and vLLM then says that one has failed."""
    for message, error in logged:
        log(message, error)
    raise RuntimeError("Engine core initialization failed.\nSee root cause above.")


def reason(*logged: tuple[str, Exception]) -> str:
    """What is raised then."""
    with pytest.raises(EngineStartError) as caught, explained(CONFIG, configure, "some/model"):
        failing_start(logged)
    return str(caught.value)


def test_the_reason_is_the_first_exception_that_ended_a_process() -> None:
    """Not one that points to another, nor that of a process that failed because the first one had, nor what was
    survived."""
    assert (
        reason(
            ("Could not load a plugin", ImportError("plugin")),
            ("WorkerProc failed to start.", MemoryError("no space\n  left")),
            ("WorkerProc failed to start.", RuntimeError("connection closed by peer")),
            ("EngineCore failed to start.", Exception("See stack trace for root cause.")),
        )
        == "MemoryError: no space left"
    )


def test_without_a_reason_vllm_s_own_words_are_all_there_is() -> None:
    """As when the kernel has killed a process."""
    assert reason() == "RuntimeError: Engine core initialization failed. See root cause above."


def test_a_refused_configuration_is_one_line_of_what_is_wrong() -> None:
    """Raised before any process has started."""
    with (
        pytest.raises(EngineStartError, match=r"^a must be even; b must be odd$"),
        explained(CONFIG, configure, "some/model"),
    ):
        raise Validation("2 validation errors\n  a\n  b\nFor further information visit an address")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("a must be\n even"), "a must be even"),
        (MemoryError("no space"), "MemoryError: no space"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_reason_begins_with_the_class_of_the_exception_unless_that_says_nothing(error: Exception, says: str) -> None:
    """Checks raise ValueError for users, and what they say is a sentence."""
    assert reason(("EngineCore failed to start.", error)) == says


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError("cannot connect to 'https://hub'"), "--model some/model: cannot connect to 'https://hub'"),
        (OSError("some/model is no repository"), "OSError: some/model is no repository"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
    ],
)
def test_a_model_whose_files_cannot_be_loaded_is_named(error: Exception, says: str) -> None:
    """Whether a process of the engine fails, or the daemon does."""
    assert reason(("EngineCore failed to start.", error)) == says
    with pytest.raises(EngineStartError) as caught, explained(CONFIG, configure, "some/model"):
        raise error
    assert str(caught.value) == says


def test_a_reason_of_our_own_stays_as_it_is() -> None:
    """Such as a setting that is refused, before any process has started."""
    with pytest.raises(EngineStartError, match=r"^--a cannot be$"), explained(CONFIG, configure, "some/model"):
        raise EngineStartError("--a cannot be")


def test_nothing_is_left_of_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, and what fails later is logged as ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with explained(CONFIG, configure, "some/model"):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    log("EngineCore failed to start.", OSError("late"))
    assert any(isinstance(each, ReportHandler) for each in logging.getLogger("vllm").handlers)
    assert list(tmp_path.iterdir()) == []
