"""What a daemon says when its engine's processes could not start."""

import json
import logging
import logging.config
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import vllm
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

from genserve.engine.vllm.start.failure import (
    DIED,
    FAILED_TO_START,
    FATAL,
    RAISED,
    EngineConfigError,
    EngineStartError,
    Report,
    ReportHandler,
    configuring,
    explained,
)

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


@contextmanager
def starting(model: str = "some/model") -> Iterator[Report]:
    """A start in the block, and what its processes report."""
    with closing(Report()) as report, explained(CONFIG, configure, model, report):
        yield report


def reason(*logged: tuple[str, Exception]) -> str:
    """What is raised then."""
    with pytest.raises(EngineStartError) as caught, starting():
        failing_start(logged)
    return str(caught.value)


def cause(*logged: tuple[str, Exception | None]) -> str:
    """What an engine has died of, whose processes log that after their start."""
    with closing(Report()) as report:
        with explained(CONFIG, configure, "some/model", report):
            pass
        for message, error in logged:
            if error is None:
                logging.getLogger("vllm.v1.executor").error(message)
            else:
                log(message, error)
        return report.cause()


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


def answer(status: int) -> httpx.Response:
    """Of a hub."""
    return httpx.Response(status, request=httpx.Request("GET", "https://hub"))


@pytest.mark.parametrize(
    ("said", "is_final"),
    [
        (RepositoryNotFoundError("the hub's own words", response=answer(404)), True),
        (HfHubHTTPError("the hub's own words", response=answer(503)), False),
        (HFValidationError("the hub's own words"), True),
    ],
)
def test_a_model_that_the_hub_does_not_have_is_refused_for_good(said: Exception, is_final: bool) -> None:
    """Nor can have, by its name; and not one that it does not give now. transformers says all by an OSError."""

    def load() -> None:
        try:
            raise said
        except (OSError, ValueError) as error:
            raise OSError("some/model is no repository") from error

    with pytest.raises(EngineConfigError if is_final else OSError) as caught, configuring("some/model"):
        load()
    assert str(caught.value) == "some/model is no repository"


def test_a_refused_configuration_is_one_line_of_what_is_wrong() -> None:
    """Raised before any process has started."""
    with (
        pytest.raises(EngineStartError, match=r"^a must be even; b must be odd$"),
        starting(),
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
def test_reason_begins_with_the_exception_class_unless_it_is_generic(error: Exception, says: str) -> None:
    """Checks raise ValueError for users, and what they say is a sentence."""
    assert reason(("EngineCore failed to start.", error)) == says


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError("cannot connect to 'https://hub'"), "--model some/model: cannot connect to 'https://hub'"),
        (OSError("some/model is no repository"), "some/model is no repository"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (RuntimeError("out of memory"), "RuntimeError: out of memory"),
    ],
)
def test_a_model_whose_files_cannot_be_loaded_is_named(error: Exception, says: str) -> None:
    """Whether a process of the engine fails, or the daemon does."""
    assert reason(("EngineCore failed to start.", error)) == says
    with pytest.raises(EngineStartError) as caught, starting():
        raise error
    assert str(caught.value) == says


def test_a_reason_of_our_own_stays_as_it_is() -> None:
    """Such as a setting that is refused, before any process has started."""
    with pytest.raises(EngineStartError, match=r"^--a cannot be$"), starting():
        raise EngineStartError("--a cannot be")


def test_nothing_is_left_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, and what fails later is logged as ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with starting():
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    log("EngineCore failed to start.", OSError("late"))
    assert any(isinstance(each, ReportHandler) for each in logging.getLogger("vllm").handlers)
    assert list(tmp_path.iterdir()) == []


FAILED = "Worker failed with error '{}', please check the stack trace above for the root cause"
FAILED_BY_X = FAILED.format("'x'")
CORE = "EngineCore encountered a fatal error."
WORKER = "WorkerProc hit an exception."


@pytest.mark.parametrize(
    ("logged", "says"),
    [
        # One rank: the worker is in EngineCore.
        ([(CORE, AssertionError("head size"))], "AssertionError: head size"),
        # A worker raises, and EngineCore has its text.
        ([(WORKER, KeyError("x")), (CORE, RuntimeError(FAILED_BY_X))], "KeyError: 'x'"),
        ([(WORKER, AssertionError()), (CORE, RuntimeError(FAILED.format("")))], "AssertionError"),
        # Or a worker on another host, whose file nobody reads.
        ([(CORE, RuntimeError(FAILED.format("no kernel")))], "no kernel"),
        # What was survived is not the cause of what comes later.
        ([(WORKER, MemoryError("of a wake-up")), (CORE, OSError("a socket"))], "OSError: a socket"),
        (
            [
                (WORKER, MemoryError("of a wake-up")),
                (WORKER, KeyError("x")),
                (CORE, RuntimeError(FAILED_BY_X)),
            ],
            "KeyError: 'x'",
        ),
        # The other engine ends because this one has.
        (
            [
                (WORKER, KeyError("x")),
                (CORE, RuntimeError(FAILED_BY_X)),
                (CORE, RuntimeError("connection closed by peer")),
            ],
            "KeyError: 'x'",
        ),
        # A worker is killed.
        (
            [
                ("Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", None),
                (CORE, RuntimeError("Executor failed.")),
            ],
            "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.",
        ),
        # EngineCore is killed.
        ([], ""),
        ([("a plugin failed", ImportError("plugin"))], ""),
    ],
)
def test_cause_of_death_is_the_exception_of_the_first_process_to_end(
    logged: Sequence[tuple[str, Exception | None]], says: str
) -> None:
    """As for a start; long after it, too."""
    assert cause(*logged) == says


@pytest.mark.parametrize(
    ("logged", "found", "says"),
    [
        ([], "it has not answered for 5.0 s", "it has not answered for 5.0 s"),
        ([(WORKER, KeyError("x"))], "it has not answered for 5.0 s", "it has not answered for 5.0 s"),
        ([(CORE, OSError("a socket"))], "a worker failed in prepare: cancelled", "OSError: a socket"),
        ([(WORKER, KeyError("x"))], f"a worker failed in commit: {FAILED_BY_X}", "KeyError: 'x'"),
        ([], f"a worker failed in commit: {FAILED_BY_X}", "'x'"),
        ([], "a worker failed in commit: see the root cause", "a worker failed in commit: see the root cause"),
    ],
)
def test_error_of_a_dead_engine_names_its_cause(logged: Sequence[tuple[str, Exception]], found: str, says: str) -> None:
    """Or keeps what it has found."""
    with closing(Report()) as report:
        with explained(CONFIG, configure, "some/model", report):
            pass
        for message, error in logged:
            log(message, error)
        assert report.explained(found) == says


def test_what_an_engine_survives_again_and_again_fills_no_disk() -> None:
    """And what ends it is told all the same."""
    with closing(Report()) as report:
        with explained(CONFIG, configure, "some/model", report):
            pass
        for _ in range(200):
            log(WORKER, MemoryError("x" * 2000))
        assert report.path.stat().st_size < 300_000
        log(CORE, OSError("a socket"))
        assert report.cause() == "OSError: a socket"


def test_a_process_that_cannot_write_its_end_ends_as_ever() -> None:
    """It has others to tell that it does."""
    with closing(Report()) as report:
        with explained(CONFIG, configure, "some/model", report):
            pass
        report.path.unlink()
        report.path.mkdir()
        log(CORE, OSError("a socket"))


def test_vllm_still_has_the_words_that_tell_what_ends_an_engine() -> None:
    """In what EngineCore, its executor and their workers log and raise."""
    package = Path(vllm.__file__).parent / "v1"
    core, executor = ((package / path).read_text() for path in ("engine/core.py", "executor/multiproc_executor.py"))
    for words in (f'logger.exception("EngineCore {FAILED_TO_START}")', f'logger.exception("{FATAL}")'):
        assert words in core
    assert 'raise RuntimeError("Executor failed.")' in core
    for words in (
        f'logger.exception("WorkerProc {FAILED_TO_START}")',
        f'logger.exception("{RAISED}")',
        f'"Worker proc %s {DIED} (exit code: %s), "',
        "Worker failed with error '{result}', please check the",
        "stack trace above for the root cause",
    ):
        assert words in executor
