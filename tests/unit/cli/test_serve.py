"""What `genserve serve` does before the daemon imports vLLM, and to the processes that vLLM starts."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from genserve.cli import main, serve
from genserve.settings.config import MAX_FRONTENDS, MAX_INGEST_PROCESSES, ServeConfig
from genserve.settings.flags import flag_of, settings_of

_MAIN = """
import atexit, gc, multiprocessing

if __name__ != "__main__":
    atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count() > 1000))

import genserve.cli

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=gc.isenabled)
    child.start()
    child.join()
"""


@pytest.mark.slow
def test_spawned_processes_collect_less_and_not_at_their_end(tmp_path: Path) -> None:
    """vLLM's processes are spawned in the same way: each imports the main script again."""
    (tmp_path / "main.py").write_text(_MAIN)
    child = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (child.stdout, child.stderr, child.returncode) == ("20000 True\n", "", 0)


def test_serve_gets_its_flags_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the engine's: `--help` and unknown ones included."""
    seen: list[list[str]] = []
    monkeypatch.setattr(serve, "run", lambda args: seen.append(args.flags) or 0)
    assert main(["serve", "--model", "m", "--help"]) == 0
    assert seen == [["--model", "m", "--help"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host", "0.0.0.0"], "--allow-insecure"),
        (["--port=abc"], "invalid int value: 'abc'"),
        (["--max_model_len", "7", "--weight_update", "sideways"], "invalid choice: 'sideways'"),
        (["--model", "/nope"], "--model: no directory /nope"),
        (["--model=./nope"], "--model: no directory ./nope"),
        (["--model=~"], "--model: no directory ~: write the path in full, ~ is not expanded here"),
        (["--api-key", "a", "--openai-port", "70000"], "--openai-port must be in [-1, 65535], is 70000"),
        (["--bogus", "1", "--max-model-length=7"], "--bogus --max-model-length (did you mean --max-model-len?)\n"),
        (["--frontend", "2"], "error: unrecognized arguments: --frontend (did you mean --frontends?)\n"),
        (["--openai_p=0", "--help"], "--openai-p (did you mean --openai-port?)\n"),
        (["--no-headless"], "error: unrecognized arguments: --no-headless (did you mean --headless?)\n"),
        (["--prot", "1"], "error: unrecognized arguments: --prot (did you mean --port?)\n"),
        (["--no-such-flag"], "error: unrecognized arguments: --no-such-flag\n"),
        (["--drain-timeout", "-1"], "argument --drain-timeout: '-1' is not a time such as 60s"),
        (["/nope"], "--model: no directory /nope"),
        (["a/b", "--model", "c/d"], "error: two models are named: a/b, and --model c/d\n"),
        (["a/b", "--model"], "genserve serve: error: argument --model: expected one argument\n"),
        (["--port", "0", "a/b"], "unrecognized arguments: a/b; a model is the first argument, or follows --model\n"),
        ([""], "genserve serve: error: --model: names no model\n"),
    ],
)
def test_what_is_wrong_with_our_own_flags_is_told_before_vllm_is_imported(flags: list[str], says: str) -> None:
    """The import takes seconds. The error is one line. Shortened flags are vLLM's alone: which flag a beginning means
    changes when one is added."""
    done = serve_without_vllm(*flags)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


_BEGINS = (
    "import types; sys.modules['genserve.daemon.serve'] = types.SimpleNamespace(main=lambda flags: print('begins'))"
)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--port", "--openai-port"])
def test_a_port_in_use_is_reported_before_vllm_is_imported(flag: str) -> None:
    """But not to those who only ask for help, or serve nothing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--port", "0", flag, str(port)]
        done = serve_without_vllm(*flags)
        told = f"127.0.0.1:{port}{' (--openai-port)' if flag != '--port' else ''}"
        assert (done.returncode, done.stdout) == (1, "False\n")
        assert done.stderr.startswith(f"genserve: cannot listen on {told}: Address already in use: ")
        assert f"choose another port with {flag} " in done.stderr
        for more in ("--help", "--help=openai", "--headless"):
            assert serve_without_vllm(*flags, more, daemon=_BEGINS).stdout == "begins\nFalse\n"


@pytest.mark.parametrize("flags", [["--help=Genserve"], ["--help=all", "--help=genserve", "--bogus"]])
def test_the_help_on_our_own_flags_does_not_import_vllm(flags: list[str]) -> None:
    """Each with its default; limits that are checked are told."""
    done = serve_without_vllm(*flags)
    *lines, imported = done.stdout.splitlines()
    assert (done.returncode, done.stderr, imported) == (0, "", "False")
    listed = [line.split()[0] for line in lines if line.startswith("  --")]
    assert listed == [flag_of(setting.name) for setting in settings_of(ServeConfig)]
    text = " ".join(" ".join(lines).split())
    for told in ("(default: 50051)", f"at most {MAX_FRONTENDS}; 0 = none", f"at most {MAX_INGEST_PROCESSES}; 0 = none"):
        assert told in text


def serve_without_vllm(*flags: str, daemon: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs the command; its last line on stdout says whether vLLM was imported. `daemon`: a module in place of it."""
    begun = f"import sys; from genserve.cli import main\n{daemon}\n"
    program = f"{begun}try: status = main()\nfinally: print('vllm' in sys.modules)\nsys.exit(status)"
    command = [sys.executable, "-c", program, "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "flags",
    [
        ["--allow_insecure", "--host=0.0.0.0"],
        ["--model", "Qwen/Qwen3-8B"],
        ["--max_model_len", "7", "--tensor-par=2", "-tp", "2"],
        ["--no-enable-prefix-caching", "--hf-overrides.rope_scaling.factor=2", "--compilation-config.mode+", "3"],
        ["--help"],
        ["--help=genserve"],
        ["--served-model-name", "--model of today"],
    ],
)
def test_flags_may_be_written_as_vllm_takes_them(flags: list[str]) -> None:
    """With underscores, shortened if they are vLLM's, or by the key of an object; a
    model may be a repository's name."""
    serve.check_flags(flags, "genserve serve")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "has no config.json"),
        ("{", "config.json cannot be read: "),
        ("[]", "config.json is not a JSON object"),
        ('{"hidden_size": 4}', "config.json has no model_type"),
    ],
)
@pytest.mark.parametrize("check", [[], ["--check"]])
def test_a_directory_that_is_no_model_is_reported_before_vllm_is_imported(
    check: list[str], config: str | None, says: str, tmp_path: Path
) -> None:
    """vLLM finds it a minute later."""
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    done = serve_without_vllm(*check, "--model", str(tmp_path))
    assert done.stdout.splitlines()[-1] == "False"
    said = done.stdout if check else done.stderr
    assert f"--model: the directory {tmp_path}" in said or f"--model: {tmp_path}" in said
    assert says in said
    assert done.returncode == (1 if check else 2)


@pytest.mark.parametrize(
    "flags",
    [["--hf-config-path", "Qwen/Qwen3-8B"], ["--config_format=mistral"], ["--hf-overrides.model_type", "llama"]],
)
def test_a_configuration_may_be_elsewhere(flags: list[str], tmp_path: Path) -> None:
    """vLLM looks where these flags say; and Mistral's own is called otherwise."""
    serve.check_flags(["--model", str(tmp_path), *flags], "genserve serve")
    (tmp_path / "params.json").write_text("{}")
    serve.check_flags(["--model", str(tmp_path)], "genserve serve")
    (tmp_path / "config.json").write_text("{}")
    serve.check_flags(["--model", str(tmp_path)], "genserve serve")
    (tmp_path / "params.json").unlink()
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "of.Ours"}}')
    serve.check_flags(["--model", str(tmp_path)], "genserve serve")


def test_flags_are_left_to_a_vllm_whose_flags_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version, one with a plugin that may add flags, or none."""
    for name, value in (
        ("Path.is_file", lambda _: False),
        ("Path.read_text", lambda *_, **__: ""),
        ("entry_points", lambda **_: ["a plugin"]),
        ("importlib.util.find_spec", lambda _: None),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"genserve.cli.serve.{name}", value)
            serve.check_flags(["--bogus"], "genserve serve")
    with pytest.raises(SystemExit):
        serve.check_flags(["--bogus"], "genserve serve")


def test_check_refuses_unknown_flag_before_vllm_import_or_model_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in model is 269 MB, and takes 20 s to build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = serve_without_vllm("--check", "--no-such-flag")
    assert done.stdout == "failed  flags      unrecognized arguments: --no-such-flag\nFalse\n"
    assert (done.returncode, done.stderr, list(tmp_path.iterdir())) == (1, "", [])
