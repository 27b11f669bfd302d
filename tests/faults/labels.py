"""Which weights a label names. Pure."""

from tests.faults.history import History, Stream


class Labels:
    """By version, and by the version of an adapter if there is one: names of `contents`."""

    def __init__(self, history: History) -> None:
        self._contents = {life: history.contents(life) for life in history.lives()}
        self._pushed = {(o.lora_name, o.lora_version): o.adapter for o in history.operations if o.kind == "push_lora"}
        # Each replica numbers by itself what it loads from a directory, which is always the same.
        self._loaded = {o.lora_name: o.adapter for o in history.operations if o.kind == "load_lora"}

    def of(self, stream: Stream) -> list[str | None]:
        """The content behind each token; None where the label means nothing."""
        contents, named = self._contents[stream.life], []
        for span in (span for delta in stream.deltas for span in delta.spans):
            name = contents.get(span.version)
            if span.lora_version and name is not None:
                pushed = self._pushed.get((stream.lora_name, span.lora_version))
                adapter = self._loaded.get(stream.lora_name, pushed)
                name = None if adapter is None else f"{name}+{adapter}"
            named += [name] * (span.end - span.start)
        return named
