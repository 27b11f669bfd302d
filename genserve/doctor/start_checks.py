"""`genserve serve --check`: what a start would find wrong, in seconds and without an engine.

CHECKS is the list. A check returns what it found, and raises what a start would say. Each runs whatever the others say.
"""

import asyncio
import contextlib
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from genserve.demo_model import built_demo_model
from genserve.doctor.children import Children
from genserve.doctor.machine import facts as machine
from genserve.doctor.machine.facts import nvidia_driver
from genserve.doctor.room import Memory, ModelSize, fits, room
from genserve.doctor.serve_flags import ServeFlags
from genserve.doctor.trial.own_model import size_of
from genserve.doctor.verdict import Finding
from genserve.errors import GenserveError
from genserve.memory.available import available_memory_bytes
from genserve.net import joined, require_free
from genserve.security.access_list import AccessList, AccessSource, listed_environment, open_access_list
from genserve.security.caller import Caller
from genserve.security.certificates import check_accepted
from genserve.settings.config import ServeConfig
from genserve.tensors.safetensors import CheckpointFileError, read_checkpoint
from genserve.worker.contract.placement import GIB

_LOOK_TIMEOUT_S = 30.0
_MOST_KEPT = 3
"""Versions on a disk: the last two, and one that is being written."""


@dataclass(frozen=True, slots=True)
class Start:
    """The daemon that is to be started. `flags`: all of them, of which `config` has the daemon's; `model`: what --model
    says."""

    config: ServeConfig
    flags: tuple[str, ...]
    model: str | None

    @property
    def directory(self) -> Path | None:
        """Where the model's files lie, if they are on this host under this name."""
        if self.model is None:
            return built_demo_model()
        return Path(self.model) if Path(self.model).is_dir() else None


def findings(start: Start) -> Iterator[Finding]:
    """Each check when it is done."""
    for name, check in CHECKS:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):  # argparse prints, and exits
                text = check(start)
        except SystemExit:
            yield Finding(name, False, said.getvalue().strip().removeprefix("genserve serve: error: "))
        except GenserveError as error:
            yield Finding(name, False, error.message)
        except (OSError, ValueError, RuntimeError) as error:
            yield Finding(name, False, str(error))
        else:
            yield Finding(name, True, text)


def addresses(start: Start) -> str:
    """Ports are free, and the directory of the Unix socket can be written."""
    config = start.config
    if config.headless:
        return "the workers of another host listen nowhere"
    require_free(config.host, config.port, config.uds)
    require_free(config.host, config.openai_port, flag="--openai-port")
    require_free(config.host, config.metrics_port, flag="--metrics-port")
    if config.uds and not os.access(directory := Path(config.uds).absolute().parent, os.W_OK | os.X_OK):
        raise OSError(f"cannot listen on unix:{config.uds}: {directory} is not writable")
    ports = ((config.port, ""), (config.openai_port, " (HTTP)"))
    listened = [f"{joined(config.host, port)}{what}" for port, what in ports if port != -1]
    return f"{', '.join([*([f'unix:{config.uds}'] if config.uds else []), *listened])} can be listened on"


def files(start: Start) -> str:
    """The configuration is JSON, and each tensor of the index is where it says."""
    directory = start.directory
    if directory is None:
        return f"not on this host: {start.model or 'the built-in model'} is looked for when the engine starts"
    size = _size(directory)
    return f"{directory}: {size.weight_bytes / GIB:.2f} GiB of weights"


def memory(start: Start) -> str:
    """There is room for the model and for a push, as far as this can be computed without a trial."""
    directory = start.directory
    if directory is None or start.config.headless:
        return "not computed: the model's files are not known"
    size, flags = _size(directory), ServeFlags.parse(start.flags, refused=())
    there = _memory()
    asked = start.config.weight_update
    found = room(size, there, flags)
    share = f"{found.needed_bytes / GIB:.1f} of {found.budget_bytes / GIB:.1f} GiB"
    if asked == "auto" and found.way == "":
        raise ValueError(f"the model and a push do not fit: {share} are needed")
    if asked != "auto" and not fits(asked, size, there, flags):
        raise ValueError(f"--weight-update {asked} does not fit" + (f": {found.way} would" if found.way else ""))
    return f"new versions fit with {found.way} ({share})" if asked == "auto" else f"new versions fit with {asked}"


def keeping(start: Start) -> str:
    """--keep-committed can be written, and has room for the versions that lie there at most."""
    if not start.config.keep_committed:
        return "no version is kept: there is no --keep-committed"
    path = Path(start.config.keep_committed).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    what = f"--keep-committed {path}: {there}"
    if not there.is_dir():
        raise OSError(f"{what} is no directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OSError(f"{what} is not writable")
    free_bytes = disk_usage(there).free
    free = f"{free_bytes / GIB:.2f} GiB are free"
    if start.directory is None:
        return f"{path} can be written, {free}: the model's size is not known"
    num_more = _MOST_KEPT - sum((path / name).exists() for name in ("current", "previous"))
    needed_bytes = num_more * _size(start.directory).weight_bytes
    needed = f"{num_more} more versions need {needed_bytes / GIB:.2f} GiB"
    if free_bytes < needed_bytes:
        raise OSError(f"{what} has too little room: {needed}, {free}")
    return f"{path} can be written: {needed}, {free}"


def engine(start: Start) -> str:
    """vLLM takes its flags and the model's configuration, and none is refused because of pushes."""
    try:
        from genserve.daemon import serve as daemon  # imports vLLM, in seconds: the other checks are done before
    except (OSError, RuntimeError) as error:  # the packages do not fit together: no flag is to blame
        raise ImportError(f"{type(error).__name__}: {error}") from error

    warnings = daemon.check(start.flags)
    return "; ".join(warnings) if warnings else "all flags are taken"


def access(start: Start) -> str:
    """Clients accept the certificate today, it is the key's, and the list of callers and the files for calls to other
    daemons can be read."""
    config = start.config
    certificate = config.certificate
    if certificate is not None:
        check_accepted(certificate)
    Caller(config.peers)
    callers = open_access_list(AccessSource(config.auth_file, listed_environment()))
    clients = " of clients that have a certificate" if certificate is not None and certificate.requires_clients else ""
    return f"{'plaintext' if certificate is None else 'TLS'}{clients}, {_described(callers)}"


def _described(callers: AccessList | None) -> str:
    if callers is None:
        return "everybody who connects may do everything"
    return f"{callers.num_tokens} tokens and {callers.num_certificates} certificates are listed"


CHECKS: tuple[tuple[str, Callable[[Start], str]], ...] = (
    ("addresses", addresses),
    ("access", access),
    ("files", files),
    ("memory", memory),
    ("keeping", keeping),
    ("flags", engine),
)


def _size(directory: Path) -> ModelSize:
    try:
        tensors = {tensor.name: tensor for tensor in read_checkpoint(directory)}
    except CheckpointFileError as error:
        raise ValueError(f"--model: {error}") from error
    return size_of(str(directory), tensors)


def _memory() -> Memory:
    if not nvidia_driver():
        return Memory(None, available_memory_bytes())
    with Children() as children:
        facts = asyncio.run(machine.look(children, _LOOK_TIMEOUT_S))
    return Memory(min((each.total_bytes for each in facts.devices), default=None), facts.host.available_bytes)
