"""How a launched daemon starts and ends. tests/engine/test_launch.py has a real one."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import typing
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

import genserve
from genserve.client import AsyncClient, Client
from genserve.errors import InvalidFieldError, UnavailableError
from genserve.launcher import DaemonFailedError, Launch, LaunchedServer, daemon_process, server
from genserve.launcher.process_group import kill_group, members_of, wait_ended
from tests.support.clocks import advanced_clock
from tests.support.patience import STEP_S, until, wait_until
from tests.support.refusals import refuses

Env = dict[str, str]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where logs are made that nobody has named."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_a_daemon_is_launched_and_drains_at_the_end_of_the_block(fake: Env, temporary: Path) -> None:
    """With a blocking client; its log is removed when all was well."""
    with genserve.launch("whatever", env=fake) as launched:
        assert isinstance(launched.client, Client)
        assert (launched.model, launched.address) == ("a model", "127.0.0.1:9")
        with refuses(UnavailableError, says=launched.address):
            launched.client.status()
        assert launched.log.parent == temporary
        where = f"address='127.0.0.1:9', model='a model', pid={launched.pid}, log='{launched.log}'"
        assert repr(launched) == f"LaunchedServer({where})"
        assert launched.exit_status is None
        assert members_of(launched.pid) == [launched.pid]
    assert launched.exit_status == 0
    assert os.listdir(temporary) == []


async def test_a_daemon_is_launched_with_an_asynchronous_client(fake: Env, temporary: Path, tmp_path: Path) -> None:
    """A log that was named is kept."""
    log = tmp_path / "log"
    async with genserve.launch("whatever", env=fake, log=log) as launched:
        assert isinstance(launched.client, AsyncClient)
    assert launched.exit_status == 0
    assert log.read_text().endswith("genserve: drained after SIGTERM\n")
    assert os.listdir(temporary) == []


def test_type_checkers_know_which_client_it_is() -> None:
    """One context manager, two protocols."""
    assert typing.get_type_hints(Launch.__enter__)["return"] == LaunchedServer[Client]
    assert typing.get_type_hints(Launch.__aenter__)["return"] == LaunchedServer[AsyncClient]


@pytest.mark.parametrize(
    ("model", "status", "says"),
    [
        ("that exits", 1, "no such model"),
        ("that is killed", -9, "SIGKILL"),
    ],
)
def test_a_daemon_that_ends_at_its_start_is_an_error_in_its_own_words(
    fake: Env, temporary: Path, model: str, status: int, says: str
) -> None:
    """In one line, at once; its log is kept, and named."""
    began_s = time.monotonic()
    with pytest.raises(DaemonFailedError) as raised, genserve.launch(model, env=fake):
        pass
    assert time.monotonic() - began_s < 60
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_status == status
    assert [raised.value.log] == list(temporary.iterdir())
    assert str(raised.value.log) in str(raised.value)


async def test_the_same_is_an_error_with_asyncio(fake: Env) -> None:
    """Of the same class."""
    with pytest.raises(DaemonFailedError, match="no such model"):
        async with genserve.launch("that exits", env=fake):
            pass


@pytest.mark.slow
def test_flag_refused_by_the_real_daemon_is_reported_before_it_loads() -> None:
    """By genserve itself, in the words of its parser."""
    with pytest.raises(DaemonFailedError, match="--weight-update") as raised:
        genserve.launch(weight_update="sideways").__enter__()
    assert raised.value.exit_status == 2
    with pytest.raises(DaemonFailedError, match="/no/where"):
        genserve.launch("/no/where").__enter__()


def test_a_daemon_that_does_not_serve_in_time_is_ended(fake: Env) -> None:
    """And all that it has started."""
    with pytest.raises(DaemonFailedError, match=r"0\.5 s \(start_timeout_s\)") as raised:
        genserve.launch("that never serves", env=fake, start_timeout_s=0.5).__enter__()
    assert_nobody_writes_to(raised.value.log)


async def test_start_timeout_error_says_what_the_daemon_was_doing(fake: Env, tmp_path: Path) -> None:
    """In its last words."""
    log = tmp_path / "log"

    async def start() -> None:
        async with genserve.launch("that never serves", env=fake, start_timeout_s=600.0, log=log):
            raise AssertionError

    with advanced_clock() as clock:
        starting = asyncio.create_task(start())
        await until(lambda: log.exists() and "starting the engine" in log.read_text())
        await clock.advance(600)
        with pytest.raises(DaemonFailedError, match=r"600 s \(start_timeout_s\).*: starting the engine"):
            await starting
    assert_nobody_writes_to(log)


async def test_a_start_that_is_cancelled_ends_the_daemon(fake: Env, temporary: Path) -> None:
    """Without a trace: nothing has failed."""

    async def start() -> None:
        async with genserve.launch("that never serves", env=fake):
            raise AssertionError

    before = set(psutil.Process().children())
    starting = asyncio.create_task(start())
    started: set[psutil.Process] = set()

    def has_started() -> bool:
        started.update(set(psutil.Process().children()) - before)
        return bool(started)

    await until(has_started)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(map(psutil.Process.is_running, started))
    assert os.listdir(temporary) == []


def test_what_a_daemon_writes_never_fills_a_pipe(fake: Env, tmp_path: Path) -> None:
    """Before and after it serves: at the end all of it is in the log."""
    with genserve.launch("that floods", env=fake, log=tmp_path / "log") as launched:
        wait_until(lambda: "genserve: flooded" in launched.log.read_text())
    text = launched.log.read_text()
    assert text.count("x") >= 1 << 20
    assert text.count("y") >= 1 << 20


@pytest.mark.parametrize(("model", "timeout_s"), [("that ignores SIGTERM", 0.5), ("with a child", 3.5)])
def test_what_does_not_end_in_time_is_killed_and_a_warning_says_so(
    fake: Env, model: str, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon itself, or a process that it has left after it had the time to drain."""
    monkeypatch.setattr(server, "CLOSE_S", timeout_s - 0.2)
    with (
        pytest.warns(RuntimeWarning, match=rf"killed {timeout_s} s "),
        genserve.launch(model, env=fake, drain_timeout_s=0.2) as launched,
    ):
        assert members_of(launched.pid)
    assert launched.exit_status == (-9 if model == "that ignores SIGTERM" else 0)
    assert launched.log.exists()
    assert members_of(launched.pid) == []


async def test_the_same_is_killed_with_asyncio(fake: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the event loop runs meanwhile."""
    monkeypatch.setattr(server, "CLOSE_S", 0.3)
    ticked = threading.Event()

    def kill_late(group: int) -> None:
        assert ticked.wait(STEP_S), "nothing ran while the daemon was waited for"
        kill_group(group)

    monkeypatch.setattr(daemon_process, "kill_group", kill_late)
    with pytest.warns(RuntimeWarning, match="killed"):
        async with genserve.launch("that ignores SIGTERM", env=fake, drain_timeout_s=0.2):
            asyncio.get_running_loop().call_later(0.1, ticked.set)
    assert ticked.is_set()


def test_a_daemon_that_ends_in_the_block_is_reported(fake: Env) -> None:
    """As a warning, or as a note on the error that it has caused."""
    with (
        pytest.warns(RuntimeWarning, match=r"the engine has died"),
        genserve.launch("that fails later", env=fake) as launched,
    ):
        assert ends_within(launched.pid, 60)
    with pytest.raises(OSError, match="lost") as raised, genserve.launch("that fails later", env=fake) as launched:
        fail_after_the_end_of(launched.pid)
    assert "the engine has died" in raised.value.__notes__[0]
    assert launched.log.exists()


def test_an_error_of_the_block_keeps_the_log_and_names_it(fake: Env) -> None:
    """Although the daemon drained as it should: it may know more."""
    with pytest.raises(OSError, match="lost") as raised, genserve.launch("whatever", env=fake) as launched:
        raise OSError("lost")
    (note,) = raised.value.__notes__
    assert str(launched.log) in note
    assert launched.exit_status == 0
    assert launched.log.exists()


def test_a_daemon_outlives_the_thread_that_has_launched_it(fake: Env) -> None:
    """The kernel ends a child that asks for it with the thread that started it, and not with the process."""
    stack = ExitStack()
    with ThreadPoolExecutor(1) as pool:
        launched = pool.submit(stack.enter_context, genserve.launch("whatever", env=fake)).result()
    with stack:
        assert not ends_within(launched.pid, 0.5)
    assert launched.exit_status == 0


def test_a_process_that_is_forked_in_the_block_does_not_end_the_daemon(fake: Env) -> None:
    """As the worker of a data loader that leaves the block by an exception."""
    launch = genserve.launch("whatever", env=fake)
    with launch as launched:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # waiting for a thread that it does not have would never end
            signal.alarm(60)
            launch.__exit__(None, None, None)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not ends_within(launched.pid, 0.3)


def test_a_launch_is_for_one_daemon(fake: Env) -> None:
    """Another block needs another launch."""
    launch = genserve.launch("whatever", env=fake)
    with launch:
        pass
    with pytest.raises(RuntimeError, match="launch"):
        launch.__enter__()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("start_timeout_s", float("nan"), "start_timeout_s"),
        ("drain_timeout_s", -1.0, "--drain-timeout"),
        ("drain_timeout", "9s", "drain_timeout_s"),
        ("headless", True, "headless"),
    ],
)
def test_what_cannot_be_launched_is_refused_at_once(name: str, value: typing.Any, says: str) -> None:
    """Before there is a process."""
    with pytest.raises(ValueError, match=says):
        genserve.launch(**{name: value})


@pytest.mark.slow
def test_importing_genserve_loads_nothing_else() -> None:
    """And `launch` is there all the same."""
    program = (
        "import sys; before = set(sys.modules); import genserve; print(sorted(set(sys.modules) - before))\n"
        "from genserve import launch\n"
        "import genserve.launcher\n"
        "print(launch is genserve.launch is genserve.launcher.launch, {'torch', 'vllm', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['genserve']", "True set()"]


def ends_within(pid: int, timeout_s: float) -> bool:
    """Whether a child ends, which is left to whoever has started it to wait for."""
    began_s = time.monotonic()
    wait_ended([pid], timeout_s)
    return time.monotonic() - began_s < timeout_s


def fail_after_the_end_of(pid: int) -> None:
    """As a call to a daemon that has died."""
    assert ends_within(pid, 60)
    raise OSError("lost")


def assert_nobody_writes_to(log: Path) -> None:
    """No process has it open."""
    for process in psutil.process_iter():
        try:
            assert str(log) not in {each.path for each in process.open_files()}
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def test_the_environment_is_this_one_with_what_was_given(fake: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    """The given ones win."""
    monkeypatch.setenv("GENSERVE_A", "here")
    monkeypatch.setenv("GENSERVE_B", "here")
    with genserve.launch("whatever", env={**fake, "GENSERVE_B": "given"}) as launched:
        found = psutil.Process(launched.pid).environ()
    assert (found["GENSERVE_A"], found["GENSERVE_B"]) == ("here", "given")


def test_what_is_said_of_tls_elsewhere_is_not_about_a_daemon_without(
    fake: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is started with a certificate: then the client takes its authorities from there."""
    monkeypatch.setenv("GENSERVE_CA_FILE", "missing.pem")
    with genserve.launch("whatever", env=fake) as launched:
        assert launched.client is not None
    with refuses(InvalidFieldError, field="ca_file"), genserve.launch("whatever", ssl_certfile="ours.pem", env=fake):
        pass


@pytest.mark.parametrize(
    ("args", "error", "says"),
    [
        ("--max-model-len 2048", TypeError, "list"),
        (["--headless"], ValueError, "headless"),
        (["--drain-timeout=100"], ValueError, "drain_timeout_s"),
    ],
)
def test_words_that_would_be_misunderstood_are_refused(args: Any, error: type[Exception], says: str) -> None:
    """Before anything is started."""
    with pytest.raises(error, match=says):
        genserve.launch(args=args)
