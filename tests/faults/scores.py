"""Which weights a stream's tokens came from: teacher forcing, in transformers' model of the same architecture.

Not in the daemon: what its exchange forgets would be missing there as well.
"""

from collections.abc import Iterable, Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.faults.contents import Contents
from tests.faults.history import START_CONTENT, History, Stream, UnlabelledStream
from tests.faults.labels import Labels
from tests.faults.unlabelled_model import served_during

_CONTROL_SHARE = 20

Behind = dict[int, dict[str, list[float]]]
"""By the stream's index and the name of the weights: how far each token lies behind the likeliest one."""


def scored(history: History, contents: Contents) -> Behind:
    """Scores every stream under all the contents that its tokens are labelled with, and those without an adapter;
    besides, under each whole one, some streams that are not, to see that the wrong weights do not fit."""
    behind: Behind = {}
    # Labels that mean nothing are for the model to find.
    labels = Labels(history)
    labelled = [{name or START_CONTENT for name in labels.of(stream)} for stream in history.streams]
    labelled = [names | {name.partition("+")[0] for name in names} for names in labelled]
    used = {*contents.names, *(name for names in labelled for name in names)}
    for number, (name, model) in enumerate(_models(contents, used)):
        for i, (stream, names) in enumerate(zip(history.streams, labelled, strict=True)):
            is_control = name in contents.names and i % _CONTROL_SHARE == number % _CONTROL_SHARE
            if name in names or (names and is_control):
                behind.setdefault(i, {})[name] = _behind(model, stream)
    return behind


def scored_unlabelled(history: History, contents: Contents) -> Behind:
    """Scores every stream without labels under all the contents that may have been served during it."""
    behind: Behind = {}
    names = [served_during(history, stream) for stream in history.unlabelled]
    for name, model in _models(contents, set().union(*names)):
        for i, stream in enumerate(history.unlabelled):
            if name in names[i] and stream.tokens:
                behind.setdefault(i, {})[name] = _behind(model, stream)
    return behind


def _models(contents: Contents, names: Iterable[str]) -> Iterator[tuple[str, torch.nn.Module]]:
    """One model, with one content after the other."""
    torch.set_num_threads(1)  # more of them would wait for each other, for so small a model
    with torch.inference_mode():
        config = AutoConfig.from_pretrained(contents.directories[START_CONTENT])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name in sorted(names):
            lacking = model.load_state_dict(contents.whole(name), strict=False)
            if lacking.unexpected_keys or set(lacking.missing_keys) - {"lm_head.weight"}:  # that one is tied
                raise AssertionError(lacking)
            yield name, model


def _behind(model: torch.nn.Module, stream: Stream | UnlabelledStream) -> list[float]:
    ids = torch.tensor([[*stream.prompt, *stream.tokens]])
    logits = model(ids).logits[0, len(stream.prompt) - 1 : -1]
    chosen = logits.gather(1, ids[0, len(stream.prompt) :, None])[:, 0]
    distances: list[float] = (logits.max(dim=1).values - chosen).tolist()
    return distances


def separation(history: History, behind: Behind, tolerance: float) -> tuple[list[float], float]:
    """Distances of tokens under their own weights, sorted, and the share of those under others beyond `tolerance`."""
    labels = Labels(history)
    own: list[float] = []
    foreign: list[float] = []
    for i, scores in behind.items():
        for position, label in enumerate(labels.of(history.streams[i])):
            for name, distances in scores.items():
                (own if label == name else foreign).append(distances[position])
    return sorted(own), sum(distance > tolerance for distance in foreign) / max(1, len(foreign))
