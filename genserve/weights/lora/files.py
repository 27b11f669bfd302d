"""The files of a LoRA adapter, kept in memory for as long as the adapter can be used, and read by daemons that pull it.

vLLM loads an adapter from a directory, and reads it again whenever it has dropped it, for example after vLLM's own
weight transfer. So this module keeps a directory of links to anonymous memory as long as the daemon runs.
"""

import shutil
import tempfile
from pathlib import Path

from genserve.engine.types import LoadedLora
from genserve.errors import InvalidFieldError, PushNotFoundError
from genserve.memory.arena import Arena
from genserve.process.leftovers import prefix
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range
from genserve.tensors.safetensors import CheckpointFileError, encoded_header
from genserve.weights.checkpoint.files import CheckpointFile, CheckpointFiles
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.checkpoint.space import CheckpointSpace
from genserve.weights.lora.config import LoraConfig, lora_issues
from genserve.weights.push.types import LoraAdapter

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"


class LoraFiles:
    """The files of one adapter. `source` says where it came from, for people. `push_id`: of the push that brought it,
    "" if none did. `size_bytes` is the memory of its tensors."""

    def __init__(self, config: LoraConfig, tensors: Arena, source: str, push_id: str = "") -> None:
        """Takes over the memory. Raises OSError after closing it."""
        self.rank = config.rank
        self.size_bytes = tensors.size_bytes
        self.source = source
        self.push_id = push_id
        self.directory = ""
        self._arenas = [tensors]
        try:
            text = config.text.encode()
            self._arenas.append(Arena.allocate(len(text)))
            self._arenas[1].write(0, text)
            self.directory = tempfile.mkdtemp(prefix=prefix("lora"))
            for name, arena in zip((TENSORS, CONFIG), self._arenas, strict=True):
                Path(self.directory, name).symlink_to(arena.path)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of_push(cls, config: LoraConfig, manifest: Manifest, staged: Arena, push_id: str) -> "LoraFiles":
        """Copies the staged bytes. It takes a second per GiB, so call it in a thread. Raises StagingFullError and
        OSError."""
        header = encoded_header((each.name, each.dtype, each.shape, each.length) for each in manifest.tensors)
        tensors = Arena.allocate(len(header) + sum(each.length for each in manifest.tensors))
        try:
            tensors.write(0, header)
            position = len(header)
            for spec in manifest.tensors:
                tensors.write(position, staged.view(spec.offset, spec.length))
                position += spec.length
        except BaseException:
            tensors.close()
            raise
        return cls(config, tensors, f"push {push_id}", push_id)

    @classmethod
    def of_directory(cls, path: Path, max_rank: int, checkpoint: CheckpointIndex | None) -> "LoraFiles":
        """Reads a directory in PEFT's format. It takes as long as the disk does, so call it in a thread. Raises
        InvalidFieldError, StagingFullError and OSError."""
        if not path.is_absolute():
            raise InvalidFieldError.of("path", "must be absolute")
        lacking = [name for name in (CONFIG, TENSORS) if not (path / name).is_file()]
        if lacking:
            raise InvalidFieldError.of("path", f"{path} has no {' and no '.join(lacking)} on the daemon's host")
        field = f"path: {CONFIG}"
        try:
            text = (path / CONFIG).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidFieldError.of(field, f"is not UTF-8, as PEFT saves it: {error}") from None
        config = LoraConfig.parse(text, max_rank, field)
        try:
            file = CheckpointFile(path / TENSORS)
            issues = lora_issues(CheckpointIndex.read_file(file).as_manifest(), checkpoint, config)
            if issues:
                shown = "; ".join(f"{each.tensor} {each.description}" for each in issues[:3])
                raise InvalidFieldError.of("path", shown)
            return cls(config, _copied(file), str(path))
        except CheckpointFileError as error:
            raise InvalidFieldError.of("path", str(error)) from error

    def close(self) -> None:
        """Frees the memory once no worker maps it. Safe to call more than once."""
        for arena in self._arenas:
            arena.close()
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)


def _copied(file: CheckpointFile) -> Arena:
    """Copies the file that was checked, not another one with its name. Raises CheckpointFileError and
    StagingFullError."""
    arena = Arena.allocate(file.size_bytes)
    try:
        file.read_into(0, arena.target(0, file.size_bytes))
    except BaseException:
        arena.close()
        raise
    return arena


class PulledLora:
    """An adapter that is loaded, for another daemon that is to have it as well. It is pulled as a whole, under the id
    of its push. It can be read to its end, also if another one takes its place meanwhile."""

    content_digest = ""
    origin = ""

    def __init__(self, loaded: LoadedLora) -> None:
        """Opens its files: call it in a thread. Raises PushNotFoundError if it is not loaded any more."""
        self.push_id = loaded.push_id
        self.weight_version = loaded.version
        directory = Path(loaded.directory)
        try:
            self.lora = LoraAdapter(loaded.name, (directory / CONFIG).read_text())
            files = CheckpointFiles([directory / TENSORS])
            self._space = CheckpointSpace(CheckpointIndex.read(files), files)
        except (OSError, CheckpointFileError) as error:
            raise PushNotFoundError(
                f"adapter {loaded.name!r} of push {self.push_id!r} is not loaded any more",
                metadata={"push_id": self.push_id},
            ) from error

    @property
    def manifest(self) -> Manifest:
        """Its tensors."""
        return self._space.manifest

    @property
    def size_bytes(self) -> int:
        """Of its tensors."""
        return self.manifest.total_bytes

    def there(self, start: int, end: int) -> Range | None:
        """All of the bytes are there."""
        return start, end

    async def wait(self) -> None:
        """Nothing is waited for."""

    async def wait_complete(self) -> None:
        """Returns at once."""

    def view(self, start: int, end: int) -> memoryview:
        """The bytes [start, end), read."""
        data = memoryview(bytearray(end - start))
        self._space.read_into(start, data)
        return data
