"""How much memory the machine has left, or the container."""

from pathlib import Path

from genserve.errors import StagingFullError

MARGIN_BYTES = 256 << 20
"""Memory that is left for everything else on the machine."""


def require_memory(size_bytes: int, freed_bytes: int = 0) -> None:
    """Raises StagingFullError if the machine has too little memory, even after `freed_bytes` are freed, or if the
    kernel does not report it."""
    try:
        available_bytes = available_memory_bytes() + freed_bytes
    except OSError as error:
        raise StagingFullError(
            f"{size_bytes} bytes are to be staged, and the memory cannot be asked for: {error}"
        ) from error
    if size_bytes > max(0, available_bytes - MARGIN_BYTES):
        raise StagingFullError(
            f"{size_bytes} bytes are to be staged, {available_bytes} bytes of memory are available",
            metadata={"available_bytes": str(available_bytes)},
        )


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be allocated without swapping, in bytes: of the machine, or of the control group (v2) if that is
    less."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        unified = next(line[3:] for line in (proc / "self/cgroup").read_text().splitlines() if line.startswith("0::"))
        group = cgroups / unified.strip().lstrip("/")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            # Cached files count as used, but are dropped when memory is needed.
            used_bytes = int((group / "memory.current").read_text()) - int(stat["inactive_file"])
            available_bytes = min(available_bytes, max(0, int(limit) - used_bytes))
    except (OSError, StopIteration, KeyError, ValueError):
        pass  # no control group of this version, or no permission
    return available_bytes
