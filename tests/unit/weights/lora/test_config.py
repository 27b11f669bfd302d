"""What an adapter must say of itself, and what its tensors must be for the model."""

import json
import math
from typing import Any

import pytest

from genserve.errors import InvalidFieldError
from genserve.tensors.manifest import Manifest, PushIssue
from genserve.weights.checkpoint.index import CheckpointIndex, CheckpointTensor
from genserve.weights.lora.config import LoraConfig, lora_issues

MAX_RANK = 8
CHECKPOINT = CheckpointIndex({"layers.0.q.weight": CheckpointTensor("F32", (6, 4), 96)})
MODULE = "base_model.model.layers.0.q"


def text_of(**fields: Any) -> str:
    """PEFT's configuration with these fields; None leaves one out."""
    config = {"r": 2, "lora_alpha": 4, "target_modules": ["q"]} | fields
    return json.dumps({name: value for name, value in config.items() if value is not None})


def parsed(**fields: Any) -> LoraConfig:
    """Such a configuration."""
    return LoraConfig.parse(text_of(**fields), MAX_RANK, "config")


def refusal(text: str) -> str:
    """What is wrong with a configuration, of which the error has the path."""
    with pytest.raises(InvalidFieldError) as caught:
        LoraConfig.parse(text, MAX_RANK, "config")
    (violation,) = caught.value.violations
    assert violation.field == "config"
    return violation.description


@pytest.mark.parametrize(
    ("fields", "rank"),
    [
        ({"r": 1}, 1),
        ({"r": MAX_RANK}, MAX_RANK),
        ({"rank_pattern": {"q": 1, "k": 5}}, 5),
        ({"rank_pattern": {}}, 2),
        ({"rank_pattern": None}, 2),
    ],
)
def test_the_rank_is_the_largest_of_any_module(fields: dict[str, Any], rank: int) -> None:
    """vLLM makes room for it."""
    config = parsed(**fields)
    assert config.rank == rank
    assert json.loads(config.text)["lora_alpha"] == 4


@pytest.mark.parametrize(
    "fields", [{"r": 0}, {"r": -1}, {"r": 1.0}, {"r": "1"}, {"r": True}, {"rank_pattern": {"q": 0}}]
)
def test_a_rank_is_a_whole_number_above_0(fields: dict[str, Any]) -> None:
    """True is 1 for Python alone."""
    assert refusal(text_of(**fields)) == "r and the ranks of rank_pattern must be whole numbers above 0"


@pytest.mark.parametrize("fields", [{"r": MAX_RANK + 1}, {"rank_pattern": {"q": MAX_RANK + 1}}])
def test_a_rank_above_that_of_the_daemon_is_refused(fields: dict[str, Any]) -> None:
    """The error names the flag."""
    assert refusal(text_of(**fields)) == "has rank 9, the daemon runs with --max-lora-rank 8"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lora_alpha": "x"}, "lora_alpha must be a number in the range of float32"),
        ({"lora_alpha": True}, "lora_alpha must be a number in the range of float32"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number in the range of float32"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number in the range of float32"),
        ({"alpha_pattern": {"q": "8"}}, "the values of alpha_pattern must be numbers in the range of float32"),
        ({"lora_alpha": -1e39}, "lora_alpha must be a number in the range of float32"),
        ({"alpha_pattern": {"q": 1e308}}, "the values of alpha_pattern must be numbers in the range of float32"),
        ({"alpha_pattern": [8]}, "alpha_pattern must be an object"),
        (
            {"rank_pattern": [2], "lora_alpha": []},
            "rank_pattern must be an object; lora_alpha must be a number in the range of float32",
        ),
    ],
)
def test_what_is_no_number_is_refused_by_its_name(fields: dict[str, Any], says: str) -> None:
    """vLLM's workers would compute with it."""
    assert refusal(text_of(**fields)) == says


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"use_dora": True}, "use_dora: DoRA"),
        ({"bias": "lora_only"}, "bias: biases of the model's layers"),
        ({"lora_bias": True}, "lora_bias: a bias of the adapter's own"),
        ({"modules_to_save": ["lm_head", "score"]}, "modules_to_save: whole layers"),
        ({"modules_to_save": "lm_head"}, "modules_to_save: whole layers"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices: single rows of embeddings"),
        ({"use_qalora": True, "use_dora": True}, "use_dora: DoRA; use_qalora: QALoRA"),
    ],
)
def test_a_feature_that_vllm_does_not_have_is_refused_by_its_name(fields: dict[str, Any], says: str) -> None:
    """Before the tensors come, with what to do instead."""
    assert refusal(text_of(**fields)).startswith(f"has what vLLM's adapters do not have: {says}")
    assert "merge the adapter and push the weights" in refusal(text_of(**fields))


def test_a_bias_that_is_none_in_another_way_is_no_bias_of_the_model() -> None:
    """PEFT and vLLM refuse null, too: the refusal says what they take."""
    text = text_of().replace("{", '{"bias": null, ', 1)
    assert refusal(text) == 'bias must be "none", as PEFT writes it'


def test_features_that_are_off_and_those_that_vllm_has_are_taken() -> None:
    """As PEFT writes them, and rank-stabilized scaling."""
    off = {"use_dora": False, "bias": "none", "lora_bias": False, "modules_to_save": None, "use_bdlora": None}
    assert parsed(**off).rank == parsed(modules_to_save=["score"]).rank == parsed(use_rslora=True).rank == 2


@pytest.mark.parametrize("alpha", [0, 0.5, -1, 1e30])
def test_a_number_is_an_alpha(alpha: float) -> None:
    """Also for single modules."""
    assert json.loads(parsed(lora_alpha=alpha, alpha_pattern={"q": alpha}).text)["lora_alpha"] == alpha


def test_what_peft_needs_must_be_there() -> None:
    """All that lacks is named at once."""
    assert "lora_alpha, target_modules" in refusal(text_of(lora_alpha=None, target_modules=None))
    assert " r, " in refusal(text_of(r=None))


def test_what_is_no_json_object_is_refused() -> None:
    """However deep it is."""
    for text in ("{", "[" * 100_000, "[]"):
        assert "JSON" in refusal(text)


def issues(checkpoint: CheckpointIndex | None = CHECKPOINT, **shapes: tuple[int, ...]) -> list[PushIssue]:
    """Of tensors of the module with these shapes, by the end of their names ("lora_A"), and rank 2."""
    named = {f"{MODULE}.{name.replace('__', '.')}.weight": shape for name, shape in shapes.items()}
    return lora_issues(manifest_of(named), checkpoint, parsed())


def manifest_of(shapes: dict[str, tuple[int, ...]]) -> Manifest:
    """Of tensors with these names."""
    return Manifest.end_to_end((name, "F32", shape, 4 * math.prod(shape)) for name, shape in shapes.items())


@pytest.mark.parametrize("rank", [1, 4, 32])
@pytest.mark.parametrize("halves", [("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")])
def test_tensors_of_a_rank_outside_the_configuration_are_refused(rank: int, halves: tuple[str, str]) -> None:
    """vLLM would scale them by the configuration's, or have no room for them; nobody else compares the two."""
    a, b = (f"{MODULE}.{half}" for half in halves)
    manifest = manifest_of({a: (rank, 4), b: (6, rank)})
    (issue,) = lora_issues(manifest, CHECKPOINT, parsed())
    assert issue.tensor == a and f"rank {rank}" in issue.description and "r = 2" in issue.description
    (issue,) = lora_issues(manifest, None, parsed(rank_pattern={"k": 3}))
    assert issue.tensor == a and f"rank {rank}" in issue.description and "2, 3" in issue.description


def test_a_rank_of_the_pattern_is_a_rank_of_the_configuration() -> None:
    """To which modules it belongs is PEFT's matter, and vLLM's."""
    manifest = manifest_of({f"{MODULE}.lora_A.weight": (5, 4), f"{MODULE}.lora_B.weight": (6, 5)})
    assert lora_issues(manifest, CHECKPOINT, parsed(rank_pattern={"q": 5})) == []


@pytest.mark.parametrize("module", ["layers.0.mlp.experts", "layers.0.mlp.experts.base_layer"])
def test_stacked_experts_have_the_rank_once_for_each(module: str) -> None:
    """As PEFT writes the adapters of a fused module."""
    for size, fits in ((8, True), (2, True), (7, False), (0, False)):
        name = f"base_model.model.{module}"
        manifest = manifest_of({f"{name}.lora_A.weight": (size, 4), f"{name}.lora_B.weight": (6, size)})
        assert (lora_issues(manifest, None, parsed()) == []) is fits
    one = manifest_of({f"{name}.lora_A.weight": (1, 4), f"{name}.lora_B.weight": (6, 1)})
    assert lora_issues(one, None, parsed(r=1)) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (f"{MODULE}.lora_magnitude_vector", "DoRA (use_dora)"),
        (f"{MODULE}.lora_magnitude_vector.default.weight", "DoRA (use_dora)"),
        (f"{MODULE}.bias", "a bias, which PEFT trains beside an adapter (bias)"),
        (f"{MODULE}.base_layer.bias", "a bias, which PEFT trains beside an adapter (bias)"),
        ("base_model.model.lm_head.weight", "a whole layer, which PEFT trains beside an adapter (modules_to_save)"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "(modules_to_save)"),
        (f"{MODULE}.lora_B.bias", "a bias of an adapter (lora_bias)"),
        (f"{MODULE}.lora_A.default.weight", "get_peft_model_state_dict"),
        ("base_model.model.embed.token_adapter.trainable_tokens_delta", "(trainable_token_indices)"),
        (f"{MODULE}.lora_E", "is not a tensor of an adapter"),
    ],
)
def test_what_peft_trains_beside_an_adapter_is_said_by_its_option(name: str, says: str) -> None:
    """vLLM has none of it; the error says what it is, and what to do instead."""
    halves = {f"{MODULE}.lora_A.weight": (2, 4), f"{MODULE}.lora_B.weight": (6, 2)}
    (issue,) = lora_issues(manifest_of(halves | {name: (6,)}), CHECKPOINT, parsed())
    assert issue.tensor == name and says in issue.description


def test_both_halves_of_a_module_fit_it_and_each_other() -> None:
    """A has its columns, B its rows, and both the rank."""
    assert issues(lora_A=(2, 4), lora_B=(6, 2)) == []
    (rank,) = issues(lora_A=(2, 4), lora_B=(6, 3))
    assert rank == PushIssue(f"{MODULE}.lora_A.weight", "has rank 2, and its B 3")
    (columns,) = issues(lora_A=(2, 5), lora_B=(6, 2))
    assert columns == PushIssue(f"{MODULE}.lora_A.weight", "has 5 columns, the module's weight has 4")
    (rows,) = issues(lora_A=(2, 4), lora_B=(7, 2))
    assert rows == PushIssue(f"{MODULE}.lora_B.weight", "has 7 rows, the module's weight has 6")


@pytest.mark.parametrize(("half", "other"), [("lora_A", "B"), ("lora_B", "A")])
def test_a_half_alone_lacks_the_other(half: str, other: str) -> None:
    """vLLM would leave it out without a word."""
    assert issues(**{half: (2, 2)}) == [PushIssue(f"{MODULE}.{half}.weight", f"is missing its {other}")]


@pytest.mark.parametrize(
    "other", ["layers.0.q.lora_A.weight", "base_model.model.base_model.model.layers.0.q.lora_A.weight"]
)
def test_a_module_has_each_half_once(other: str) -> None:
    """By whichever of its names: vLLM would keep the last, without a word."""
    halves = {f"{MODULE}.lora_A.weight": (2, 4), f"{MODULE}.lora_B.weight": (6, 2)}
    first, second = sorted((other, f"{MODULE}.lora_A.weight"))
    issues = lora_issues(manifest_of(halves | {other: (2, 4)}), None, parsed())
    assert PushIssue(second, f"is for the same part of the model as '{first}': push one of them") in issues


def test_a_module_is_adapted_as_one_kind_and_saved_once() -> None:
    """An embedding is not a linear layer, and vLLM knows a saved module by the last part of its name."""
    of_embedding = {f"{MODULE}.lora_embedding_A": (2, 4), f"{MODULE}.lora_embedding_B": (6, 2)}
    halves = {f"{MODULE}.lora_A.weight": (2, 4), f"{MODULE}.lora_B.weight": (6, 2)}
    assert len(lora_issues(manifest_of(halves | of_embedding), None, parsed())) == 2
    saved = {f"{part}.score.{kind}": (3,) for part in ("base_model.model", "v") for kind in ("weight", "bias")}
    issues = lora_issues(manifest_of(halves | saved), None, parsed())
    assert [issue.tensor for issue in issues] == ["v.score.bias", "v.score.weight"]


def test_what_is_not_of_an_adapter_is_named() -> None:
    """But for what vLLM takes whole, of models that classify."""
    assert issues(score=(3, 2), classifier=(3, 2)) == []
    (foreign,) = issues(q=(3, 2))
    assert foreign.tensor == f"{MODULE}.q.weight"


def test_modules_are_looked_for_only_where_the_checkpoint_has_their_names() -> None:
    """A fused or quantised checkpoint has others: vLLM knows."""
    halves = {"lora_A": (2, 9), "lora_B": (9, 2)}
    assert issues(CheckpointIndex({"fused": CheckpointTensor("F32", (1,), 4)}), **halves) == []
    assert issues(None, **halves) == []
    assert len(issues(**halves)) == 2
    unknown = issues(lora_A=(2, 4), lora_B=(6, 2), v__lora_A=(2, 4), v__lora_B=(6, 2))
    assert len(unknown) == 2 and all(".v." in issue.tensor for issue in unknown)


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("pattern", [r"(?:(?:.|\w)+)+(?=x)", "("], ids=["endless", "none"])
def test_a_pattern_that_no_worker_can_match_is_refused(name: str, pattern: str) -> None:
    """vLLM's workers match it with every module's name, and stand still meanwhile: some patterns take years."""
    assert name in refusal(text_of(**{name: {pattern: 2}}))


@pytest.mark.parametrize(
    "key",
    [".*", "q.*k", "(q|k)", "q{9999}", "[qk]", "q+", "", "q\n", "\\d", "^^q", "\ud800", "x" * 257, "q\\"],
)
def test_only_a_name_is_a_key_of_a_pattern(key: str) -> None:
    """However harmless it is: none can take long. The refusal has the key."""
    said = refusal(text_of(alpha_pattern={"v": 1, key: 1}))
    assert said.startswith(f"alpha_pattern: {key[:64]!r}")


def test_keys_of_patterns_are_names_as_peft_writes_them() -> None:
    """PEFT's own documentation has the anchor, and what it converts has the wildcard at the beginning."""
    keys = ["q_proj", "^model.decoder.layers.0.encoder_attn.k_proj", r".*\.gate_up\-proj", ".*q", "layers\\.1\\.q$"]
    parsed(rank_pattern=dict.fromkeys(keys, 2), alpha_pattern=dict.fromkeys(keys, 0.5))


def test_keys_of_patterns_are_no_more_than_workers_keep_compiled() -> None:
    """Of both patterns together, in which the same key counts once."""
    keys = [f"layers.{number}.q" for number in range(401)]
    parsed(rank_pattern=dict.fromkeys(keys[:400], 2), alpha_pattern=dict.fromkeys(keys[1:400], 2))
    said = refusal(text_of(rank_pattern=dict.fromkeys(keys[:400], 2), alpha_pattern=dict.fromkeys(keys[1:], 2)))
    assert said.startswith("rank_pattern and alpha_pattern have 401 keys, the limit is 400")
