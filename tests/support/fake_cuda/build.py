"""Builds the library that stands in for CUDA: `python -m tests.support.fake_cuda.build DIRECTORY` says where it is.

One file takes the names of all libraries of NVIDIA that torch and vLLM link to. What they ask for and `src` does not
have is written here: functions that end the process with their name, so that nobody believes in something that did not
happen. Products of matrices and communication between ranks do nothing, as kernels do.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

SOURCES = Path(__file__).with_name("src")
SITE = Path(__file__).with_name("site")
FILE_NAME = "libcudart.so.13"
"""Of the library itself: vLLM looks for this name among the files that its process has mapped."""
_OF_NVIDIA = re.compile(r"lib(cu|nv|nccl)\w*(\.[0-9a-f]{8})?\.so(\.\d+)?$")
_SYMBOLS = re.compile(r"_*(cu|nccl|nv)\w+")
_BY_NAME = [
    "cuCtxFromGreenCtx",
    "cuDevResourceGenerateDesc",
    "cuDevSmResourceSplitByCount",
    "cuDeviceGetDevResource",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate",
    "cudaDeviceReset",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemImportFromShareableHandle",
    "cuMemRetainAllocationHandle",
    "cuMemsetD32Async",
    "cuMulticastAddDevice",
    "cuMulticastBindMem",
    "cuMulticastCreate",
    "cuMulticastUnbind",
    "cuStreamWriteValue32_v2",
]
"""What torch and vLLM look for by name, all at once, when they need one of them."""
_QUIET = re.compile(r"(cublas|nccl)")
_FLAGS = ("-std=gnu17", "-D_GNU_SOURCE", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")


def built(root: Path) -> Path:
    """The folder of the library, built unless it is there already."""
    libraries = sorted(_libraries())
    key = sha256()
    for path in [Path(__file__), *sorted(SOURCES.iterdir())]:
        key.update(path.read_bytes())
    for path in libraries:
        key.update(f"{path} {path.stat().st_size}\n".encode())
    directory = root / key.hexdigest()[:16]
    if not directory.exists():
        unfinished = directory.with_suffix(f".{os.getpid()}")
        unfinished.mkdir(parents=True)
        _build(unfinished, libraries)
        try:
            unfinished.rename(directory)
        except OSError:  # somebody else was faster
            if not directory.exists():
                raise
    return directory


def _build(directory: Path, libraries: list[Path]) -> None:
    includes = f"-I{_package('triton') / 'backends/nvidia/include'}"
    own = directory / "own.o"
    sources = [str(path) for path in SOURCES.glob("*.c")]
    objects = []
    for source in sources:
        objects.append(str(directory / f"{Path(source).stem}.o"))
        _run("gcc", *_FLAGS, includes, "-c", source, "-o", objects[-1])
    _run("gcc", "-r", *objects, "-o", str(own))
    defined = _symbols(own, "--defined-only", "--extern-only")
    wanted = {name for path in libraries for name in _symbols(path, "-D", "--undefined-only")} | set(_BY_NAME)
    generated = directory / "generated.c"
    generated.write_text(_generated(sorted(wanted - defined)))
    _run("gcc", *_FLAGS, "-shared", str(own), str(generated), "-o", str(directory / FILE_NAME), "-lpthread", "-ldl")
    for name in sorted({"libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", *_needed(libraries)} - {FILE_NAME}):
        (directory / name).symlink_to(FILE_NAME)
    for path in map(Path, [*objects, own]):
        path.unlink()


def _generated(names: Iterable[str]) -> str:
    lines = [
        "extern void complain(const char *format, ...);",
        "extern void abort(void);",
        '#define EXPORT __attribute__((visibility("default")))',
    ]
    for name in names:
        if not _SYMBOLS.fullmatch(name):
            continue
        body = "return 0;" if _QUIET.match(name) else f'complain("{name} is not there"); abort();'
        lines.append(f"EXPORT long {name}(void) {{ {body} }}")
    return "\n".join([*lines, ""])


def _libraries() -> Iterable[Path]:
    """What links to libraries of NVIDIA."""
    for package in ("torch", "vllm", "torchvision"):
        for path in _package(package).rglob("*.so"):
            if path.parent.name in ("lib", "vllm", "vllm_flash_attn", "deep_gemm", "torchvision"):
                yield path


def _needed(libraries: list[Path]) -> set[str]:
    found = _run("readelf", "-d", *map(str, libraries))
    return {name for name in re.findall(r"NEEDED.*\[(.+?)\]", found) if _OF_NVIDIA.match(name)}


def _symbols(path: Path, *options: str) -> set[str]:
    lines = _run("nm", *options, str(path)).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.strip()}


def _package(name: str) -> Path:
    """Where a package is, without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{name} is not installed")
    return Path(found.origin).parent


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {done.stderr[-3000:]}")
    if "warning" in done.stderr:
        sys.stderr.write(done.stderr)
    return done.stdout


if __name__ == "__main__":
    print(built(Path(sys.argv[1])))
