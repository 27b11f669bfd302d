"""The daemons that drivers talk to: one that is open, and one with TLS and tokens."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clients.conformance.runner import checkpoints
from tests.support.credentials import Authority, list_callers
from tests.support.daemon_process import SMALL_ENGINE, DaemonProcess, wait_ended


@dataclass(frozen=True, slots=True)
class Daemons:
    """Their addresses, and by the words of scenarios: checkpoints, and what drivers are given for the secured one."""

    open: str
    secured: str
    checkpoints: dict[str, str]
    ca_files: dict[str, str]
    tokens: dict[str, str]


@contextmanager
def running(directory: Path) -> Iterator[Daemons]:
    """Two daemons on checkpoint a, in float32. All files are in the directory."""
    paths = checkpoints.make(directory)
    flags = ["--model", paths["a"], *SMALL_ENGINE, "--dtype", "float32", "--host", "127.0.0.1"]
    own, other = Authority(directory), Authority(directory)
    pair = own.issue("127.0.0.1")
    callers = list_callers(directory, generate=["generate"], operator=["operator"])
    secured = ["--ssl-certfile", pair.cert_file, "--ssl-keyfile", pair.key_file, "--auth-file", callers.auth_file]
    processes = [
        DaemonProcess([*flags, "--enable-lora", "--max-lora-rank", "8"], directory / "open.log"),
        DaemonProcess([*flags, *secured], directory / "secured.log"),
    ]
    try:
        open_one, secured_one = (process.wait_serving().address for process in processes)
        yield Daemons(
            open_one,
            secured_one,
            paths,
            ca_files={"own": own.ca_file, "other": other.ca_file},
            tokens={**callers.tokens, "wrong": "a" * 43},
        )
        for name, process in zip(("open", "secured"), processes, strict=True):
            if (status := process.process.poll()) is not None:
                print(f"the {name} daemon has ended with {status}:\n{process.stderr[-4000:]}", file=sys.stderr)
    finally:
        for process in processes:
            process.end()
        wait_ended()
