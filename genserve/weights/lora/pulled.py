"""The bytes of an adapter that is loaded, for those who pull it: another daemon that is to have it as well."""

from pathlib import Path

from genserve.engine.types import LoadedLora
from genserve.errors import PushNotFoundError
from genserve.tensors.manifest import Manifest
from genserve.tensors.ranges import Range
from genserve.tensors.safetensors import CheckpointFileError
from genserve.weights.checkpoint.files import CheckpointFiles
from genserve.weights.checkpoint.index import CheckpointIndex
from genserve.weights.checkpoint.space import CheckpointSpace
from genserve.weights.lora.files import CONFIG, TENSORS
from genserve.weights.push.types import LoraAdapter


class PulledLora:
    """An adapter under the id of its push, which is pulled as a whole. It can be read to its end, also if another one
    takes its place meanwhile."""

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
