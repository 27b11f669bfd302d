"""`launch`: a daemon for as long as a block runs, and its client."""

import asyncio
import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Generic, TypeVar

from genserve.client import AsyncClient, Client
from genserve.launcher.daemon_process import GIVE_UP_S, DaemonFailedError, DaemonProcess, access_to
from genserve.launcher.output import LogFile, Serving
from genserve.settings.config import MAX_TIMEOUT_S, ServeConfig
from genserve.settings.flags import flag_of, settings_of

FlagValue = str | int | float | bool | os.PathLike[str] | Mapping[str, object] | Sequence[str | int | float] | None
"""What a flag can be given: None leaves it out, True is the bare flag, False its `--no-…` (nothing for a flag of the
daemon's own, which has none), a mapping is written as JSON, a sequence as several values."""

ClientT = TypeVar("ClientT", Client, AsyncClient)

_DEFAULT_START_TIMEOUT_S: Final = 600.0
CLOSE_S: Final = 30.0
"""Time to end the engine, in addition to the drain timeout."""


class LaunchedServer(Generic[ClientT]):
    """A daemon that serves: `client` is connected to it, `address` is as other clients take it, `model` is what it
    serves (the built-in one's directory if none was named), `pid` its process, `log` what it says."""

    def __init__(self, process: DaemonProcess, serving: Serving, client: ClientT) -> None:
        self._process = process
        self.client: ClientT = client
        self.address: Final = serving.address
        self.model: Final = serving.model
        self.pid: Final = process.process.pid
        self.log: Final = process.log

    def __repr__(self) -> str:
        where = f"address={self.address!r}, model={self.model!r}, pid={self.pid}, log={os.fspath(self.log)!r}"
        return f"{type(self).__name__}({where})"

    @property
    def exit_status(self) -> int | None:
        """The exit status: None while the daemon runs, 0 after a drain, -N after signal N."""
        return self._process.exit_status


class Launch:
    """What `launch` returns: a context manager for `with` and for `async with`, for one daemon."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        env: Mapping[str, str] | None,
        log: Path | None,
        start_timeout_s: float,
        drain_timeout_s: float,
    ) -> None:
        if not 0 < start_timeout_s <= MAX_TIMEOUT_S:  # written so that NaN is refused too
            raise ValueError(f"start_timeout_s must lie in (0, {MAX_TIMEOUT_S:g}], is {start_timeout_s}")
        self._flags = flags
        self._env = env
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = drain_timeout_s + CLOSE_S
        self._process: DaemonProcess | None = None
        self._client: Client | None = None
        self._async_client: AsyncClient | None = None
        self._pid = 0

    def __enter__(self) -> LaunchedServer[Client]:
        process = self._start()
        try:
            try:
                serving = process.serving.result(self._start_timeout_s)
            except TimeoutError:
                raise self._not_served(process) from None
            self._client = Client(serving.address, **access_to(self._flags))
            return LaunchedServer(process, serving, self._client)
        except BaseException as error:
            process.stop(GIVE_UP_S)
            process.ended.result()
            self._keep_log(process, isinstance(error, Exception))
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process, client = self._process, self._client
        if process is None or client is None or os.getpid() != self._pid:
            return  # of a process that was forked in the block: the daemon is its parent's
        has_ended = process.exit_status is not None
        try:
            client.close()
            process.stop(self._stop_timeout_s)
            was_killed = process.ended.result()
        except BaseException:  # a second interrupt, say
            process.kill()
            process.ended.result()
            raise
        self._tell(process, was_killed and not has_ended, error)

    async def __aenter__(self) -> LaunchedServer[AsyncClient]:
        process = self._start()
        try:
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    serving = await asyncio.wrap_future(process.serving)
            except TimeoutError:
                raise self._not_served(process) from None
            self._async_client = AsyncClient(serving.address, **access_to(self._flags))
            return LaunchedServer(process, serving, self._async_client)
        except BaseException as error:
            process.stop(GIVE_UP_S)
            await asyncio.wrap_future(process.ended)
            self._keep_log(process, isinstance(error, Exception))
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process, client = self._process, self._async_client
        if process is None or client is None or os.getpid() != self._pid:
            return
        has_ended = process.exit_status is not None
        try:
            await client.close()
            process.stop(self._stop_timeout_s)
            was_killed = await asyncio.wrap_future(process.ended)
        except BaseException:
            process.kill()
            await asyncio.wrap_future(process.ended)
            raise
        self._tell(process, was_killed and not has_ended, error)

    def _start(self) -> DaemonProcess:
        if self._process is not None:
            raise RuntimeError("a launch is for one daemon: call launch() again for another one")
        self._pid = os.getpid()
        self._process = DaemonProcess(self._flags, LogFile(self._log_path()), self._env)
        return self._process

    def _log_path(self) -> Path:
        if self._log is not None:
            return self._log
        descriptor, name = tempfile.mkstemp(prefix="genserve-", suffix=".log")
        os.close(descriptor)
        return Path(name)

    def _not_served(self, process: DaemonProcess) -> DaemonFailedError:
        return process.failure(f"the daemon did not serve within {self._start_timeout_s:g} s (start_timeout_s)")

    def _keep_log(self, process: DaemonProcess, is_wanted: bool) -> None:
        if self._log is None and not is_wanted:
            process.log.unlink(missing_ok=True)

    def _tell(self, process: DaemonProcess, was_killed: bool, error: BaseException | None) -> None:
        """What was wrong about its end goes with the error that ends the block; else it is a warning: what the block
        has done is done, and must not be lost."""
        is_wrong = was_killed or process.exit_status != 0
        self._keep_log(process, is_wrong or isinstance(error, Exception))
        if not is_wrong:
            if isinstance(error, Exception):
                error.add_note(f"the daemon's log: {process.log}")
            return
        killed = (
            f"the daemon, or a process of it, had to be killed {self._stop_timeout_s:g} s after it was told to stop"
        )
        failure = process.failure(killed if was_killed else "")
        if error is not None:
            error.add_note(str(failure))
        else:
            warnings.warn(str(failure), RuntimeWarning, stacklevel=3)


def launch(
    model: str | os.PathLike[str] | None = None,
    *,
    port: int = 0,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    log: str | os.PathLike[str] | None = None,
    start_timeout_s: float = _DEFAULT_START_TIMEOUT_S,
    drain_timeout_s: float | None = None,
    **flags: FlagValue,
) -> Launch:
    """A daemon (`genserve serve`) in a process of its own, from the beginning of a block to its end:

        with genserve.launch("path/or/hub-id", max_model_len=2048) as server:  # server.client: Client
            print(server.client.generate("Once upon a time", max_tokens=16).text)

        async with genserve.launch("path/or/hub-id") as server:  # server.client: AsyncClient

    The block begins when the daemon serves. At its end the client is closed, the daemon drains, and whatever is left of
    it `drain_timeout_s` + 30 s later is killed, of which a RuntimeWarning tells, or a note on the error that has ended
    the block. An interrupt (Ctrl-C) is this process's alone: the first one ends the block and the daemon drains, one
    that comes meanwhile kills it. A daemon whose launcher was killed drains, and ends.

    `model`: a checkpoint's directory or its name on the hub; None = the built-in one. `port`: 0 picks a free one.
    `flags`: any flag of `genserve serve`, those of vLLM too: `max_model_len=2048` is `--max-model-len 2048`,
    `heartbeat_timeout_s=4.0` is `--heartbeat-timeout 4s`, True the bare flag, False its `--no-…`, a list several
    values, a mapping JSON, None nothing. `args` follow them as they are. `env` is added to this process's environment.
    `log`: a file for what the daemon says; default: a temporary one, which is removed unless something went wrong.
    `start_timeout_s`: to load and, from the hub, to download.
    `drain_timeout_s`: for requests that run at the end, those of others too; default: that of `--drain-timeout`.

    Raises ValueError and TypeError for what cannot be, on entering the block DaemonFailedError, with the daemon's last
    words in its one line, and OSError.
    """
    if isinstance(args, str):
        raise TypeError("args: a list of words, and not one string")
    in_args = {word.partition("=")[0] for word in args}
    if "headless" in flags or "--headless" in in_args:
        raise ValueError("headless: the workers of another host serve nobody, so nobody can wait until they do")
    if "--drain-timeout" in in_args or "drain_timeout" in flags:
        raise ValueError(
            "--drain-timeout: give drain_timeout_s as a keyword, so that the daemon is not killed while it drains"
        )
    checked = ServeConfig() if drain_timeout_s is None else ServeConfig(drain_timeout_s=drain_timeout_s)
    named = {"model": model, "port": port, "drain_timeout_s": checked.drain_timeout_s, **flags}
    return Launch(
        [*flags_of(named), *args],
        env=env,
        log=None if log is None else Path(log),
        start_timeout_s=start_timeout_s,
        drain_timeout_s=checked.drain_timeout_s,
    )


def flags_of(values: Mapping[str, FlagValue]) -> list[str]:
    """Flags by their names with underscores: `max_model_len=2048` is `--max-model-len 2048`. Raises TypeError."""
    own = {setting.name: setting for setting in settings_of(ServeConfig)}
    flags = []
    for name, value in values.items():
        if value is None or (value is False and name in own and isinstance(own[name].default, bool)):
            continue
        flags += _flag(flag_of(name)[2:] if name in own else name.replace("_", "-"), value)
    return flags


def _flag(name: str, value: FlagValue) -> list[str]:
    if value is True:
        return [f"--{name}"]
    if value is False:
        return [f"--no-{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(value)]
    if isinstance(value, str | int | float | os.PathLike):
        text = _text(name, value)
        # Of a value that begins like a flag only this form can be read; of --config vLLM reads only the other one.
        return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [f"--{name}", *(_text(name, each) for each in value)]
    raise _unfit(name, value)


def _text(name: str, value: object) -> str:
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise _unfit(name, value)


def _unfit(name: str, value: object) -> TypeError:
    return TypeError(f"{name.replace('-', '_')}: a value of type {type(value).__name__} cannot be given to a flag")
