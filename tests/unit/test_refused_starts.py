"""What `genserve serve` refuses from its flags alone: at once, before a model is prepared or looked for."""

from pathlib import Path

import pytest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from genserve.cli import serve
from genserve.daemon import serve as daemon
from genserve.engine.vllm.start import config
from genserve.engine.vllm.start.config import AsyncEngineArgs
from genserve.engine.vllm.start.failure import EngineConfigError
from genserve.settings.config import ServeConfig


@pytest.fixture
def nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No demo model is made, and vLLM sees no flag."""

    def fail(*_: object) -> None:
        raise AssertionError("looked for a model")

    monkeypatch.setattr(daemon, "demo_model_path", fail)
    monkeypatch.setattr(AsyncEngineArgs, "from_cli_args", fail)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--enable-elastic-ep"], "[elastic-experts]"),
        (["--enable-eplb", "--model", "Qwen/Qwen3-8B"], "[expert-load-balancing]"),
        (["--offload-backend", "prefetch"], "[weights-prefetched-from-host]"),
        (["--weight-update", "host"], "--weight-update host needs a GPU"),
        (["--api-key", "secret"], "--api-key is for the OpenAI server: pass --openai-port too"),
        (["--openai-port", "0", "--enable-auto-tool-choice"], "--enable-auto-tool-choice requires --tool-call-parser"),
        (["--openai-port", "0", "--tool-call-parser", "x", "--enable-auto-tool-choice"], "invalid tool call parser: x"),
    ],
)
def test_a_refused_flag_is_reported_before_a_model_is_looked_for(
    nothing_is_looked_for: None, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with the status of wrong usage: another start would end in the same way."""
    assert daemon.main(flags) == daemon.EXIT_REFUSED
    errors = capsys.readouterr().err
    assert errors.startswith("genserve: ")
    assert says in errors
    assert errors.count("\n") == 1


async def test_a_daemon_that_has_ended_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last that is said is why it ended. Nothing hangs in one whose start was refused."""
    limits: list[tuple[object, ...]] = []
    monkeypatch.setattr(daemon, "exit_within", lambda seconds, *told: limits.append(told))

    async def serves(status: int, error: Exception | None = None) -> int:
        if error is not None:
            raise error
        return status

    assert await daemon.ending(serves(3)) == 3
    for error in (RuntimeError("died"), EngineConfigError("refused")):
        with pytest.raises(type(error)):
            await daemon.ending(serves(0, error))
    assert limits == [(3,), (daemon.EXIT_FAILED, "died")]


@pytest.mark.slow
def test_uncached_model_is_named_when_there_is_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    """With the variable that says so: tests are run with it."""
    assert daemon.main(["--model", "genserve/not-there"]) == daemon.EXIT_REFUSED
    assert capsys.readouterr().err == (
        "genserve: --model genserve/not-there is not in the Hugging Face cache, and the network is off "
        "(HF_HUB_OFFLINE): unset it, or name a directory\n"
    )


@pytest.mark.parametrize("flags", [["--tensor-parallel-size", "two"], ["--no-such-flag"]])
def test_wrong_usage_of_vllms_flags_is_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without the usage of hundreds of flags."""
    with pytest.raises(SystemExit) as exited:
        daemon.main(flags)
    assert exited.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("genserve serve: error: ")
    assert flags[0] in errors
    assert errors.count("\n") == 1


def test_our_flags_cannot_be_shortened_in_a_file_either(
    nothing_is_looked_for: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command cannot check what is in it. vLLM's flags can be shortened everywhere."""
    (tmp_path / "flags.yaml").write_text("frontend: 2\n")
    with pytest.raises(SystemExit):
        daemon.main(["--config", str(tmp_path / "flags.yaml"), "--port", "0"])
    assert capsys.readouterr().err == "genserve serve: error: unrecognized arguments: --frontend 2\n"
    parser = config.parser("genserve serve", "")
    ServeConfig.add_flags(parser)
    flags = parser.parse_args(["--tensor-par=2", "--frontends", "3"])
    assert (flags.tensor_parallel_size, flags.frontends) == (2, 3)


def test_every_flag_of_the_engine_is_known_before_vllm_is_imported() -> None:
    """The command reads their names in vLLM's source. None may be refused that vLLM takes."""
    flags = [flag for flag in config.parser("genserve serve", "")._option_string_actions if flag.startswith("--")]
    assert len(flags) > 250
    assert serve.unknown_flags([f"{flag}=1" for flag in flags], []) == []
    assert serve.unknown_flags(["--no-such-flag=1"], []) == ["--no-such-flag"]


def test_help_for_a_group_that_is_none_names_those_that_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours among them."""
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)  # which parsing sets for good
    with pytest.raises(SystemExit):
        daemon.main(["--help=vllm"])
    told = capsys.readouterr().out
    assert "No group or arguments matching 'vllm'" in told
    groups = told.partition("Groups: ")[2]
    assert all(group in groups for group in ("ModelConfig", "ParallelConfig", "genserve", "openai"))
