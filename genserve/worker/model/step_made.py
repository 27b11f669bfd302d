"""Values that vLLM's steps make on a loaded model, as read in vLLM 0.32 and 0.33.

No exchange replaces them, because loading does not make them. So those that are known are in one of three tables, by
class and attribute:

- `WEIGHT_FREE` does not depend on weights: tables of positions, scratch memory, state of a step. A push keeps it.
- `FROM_NUMBERS` is computed once from numbers that are exchanged: the scales of an fp8 KV cache. A push keeps it, and
  is refused if one of those numbers changes.
- `FROM_WEIGHTS` is computed from weights once, and a push does not update it. A model that has one is refused.

A number or a tensor that is in no table may be computed from weights, so a push is refused then. Nobody but a reader
can tell that it is not. Rules that judged vLLM's source (each step makes it anew, it is made without tensors) accepted
pushes after which contents of the old weights were served: helpers, subclasses, decorators and tensors of zeros that
are written into later looked harmless.
tests/unit/worker/model/test_step_candidates.py lists what a new vLLM's steps make, for these tables.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from genserve.worker.model.contents import address_of
from genserve.worker.model.tree import NOT_WEIGHTS, Holding, owners


@dataclass(frozen=True, slots=True)
class Row:
    """Attributes of a class, or of any for "". `file`, below vLLM's package, is where they are set. `in_steps`: the
    tensors are made in steps, which run in inference mode, so that one which is not of that mode is another. `since`:
    the first vLLM that has it, if the oldest that is supported has not."""

    file: str
    owner: str
    keys: tuple[str, ...]
    in_steps: bool = True
    since: tuple[int, int] = (0, 32)


_EP = "model_executor/layers/fused_moe/prepare_finalize/"
_ATTENTION = "v1/attention/backends/"
_MODELS = "model_executor/models/"

WEIGHT_FREE: tuple[Row, ...] = (
    # Of a step: results for another layer, and handles of communication between ranks.
    Row("model_executor/layers/fused_moe/runner/shared_experts.py", "SharedExperts", ("_output",)),
    Row("model_executor/layers/fused_moe/router/zero_expert_router.py", "ZeroExpertRouter", ("_zero_expert_output",)),
    Row(_EP + "deepep_ht.py", "DeepEPHTPrepareAndFinalize", ("handles",)),
    Row(_EP + "deepep_ll.py", "DeepEPLLPrepareAndFinalize", ("handles",)),
    Row(_EP + "deepep_v2.py", "DeepEPV2PrepareAndFinalize", ("handles", "_global_expert_ids_cache")),
    Row(_EP + "nixl_ep.py", "NixlEPPrepareAndFinalize", ("handles",)),
    Row(_EP + "mori.py", "MoriPrepareAndFinalize", ("_dispatch_topk_ids",)),
    Row(_EP + "moonep.py", "MoonEPPrepareAndFinalize", ("_buffer", "_plan", "_cu_seqlens")),
    Row(_EP + "flashinfer_nvlink_two_sided.py", "FlashInferNVLinkTwoSidedPrepareAndFinalize", ("alltoall_info",)),
    Row(_MODELS + "qwen3_vl.py", "", ("deepstack_input_embeds",)),  # four other vision models set it too
    Row(_MODELS + "granite4_vision.py", "Granite4VisionForConditionalGeneration", ("_ds_buffers",)),
    Row(_MODELS + "diffusion_gemma.py", "DiffusionGemmaModelState", ("_pending_mm_embeds",)),
    Row(_MODELS + "ernie45_vl.py", "", ("visual_token_mask",)),  # three other vision models set it too
    Row(_MODELS + "siglip.py", "SiglipEmbeddingModel", ("_mm_token_mask", "_has_text_tokens")),
    Row(_MODELS + "clip.py", "CLIPEmbeddingModel", ("_mm_token_mask", "_has_text_tokens")),
    Row("models/inkling/nvidia/moe.py", "InklingMoE", ("_routed_sel",)),
    Row("models/deepseek_v41/decoder_replay_layers.py", "DecoderReplayLayers", ("_break_outputs",)),
    Row(_ATTENTION + "flex_attention.py", "FlexAttentionImpl", ("mm_prefix_range",), in_steps=False),
    Row(_ATTENTION + "mla/prefill/base.py", "MLAPrefillBackend", ("_prefill_metadata",), in_steps=False),
    Row(_ATTENTION + "mla/prefill/trtllm_ragged.py", "TrtllmRaggedPrefillBackend", ("_query_seq_lens",)),
    Row(_ATTENTION + "mla/prefill/tokenspeed_mla.py", "TokenspeedMLAPrefillBackend", ("_query_seq_lens",)),
    # Scratch memory.
    Row(
        "model_executor/layers/fused_moe/moe_permute_unpermute.py",
        "MoEPermuteScratch",
        (
            "token_expert_indices", "permuted_idx", "inv_permuted_idx", "permuted_experts_id", "sorted_row_idx",
            "topk_ids_int32", "topk_ids_for_sort", "sort_workspace",
        ),
    ),
    Row(_EP + "moonep.py", "MoonEPBufferPool", ("_buffers",)),
    Row("model_executor/layers/hpc/rope_norm.py", "HpcRopeNorm", ("_kv_scratch",)),
    Row("models/deepseek_v41/common/engram.py", "NgramHashState", ("_cache",)),  # hashes of tokens, by slot
    Row("models/kimi_k3/nvidia/latent_moe_runner.py", "LatentMoERunner", ("_zero_residual",)),
    Row("models/qwen4_exp/common/ngram_embedding.py", "Qwen4ExpPLEPinnedHostEmbedding", ("_prefetch_buffer",)),
    Row(_ATTENTION + "mla/flashinfer_mla_sparse.py", "FlashInferMLASparseImpl", ("_workspace_buffer",)),
    Row(_ATTENTION + "mla/flashinfer_mla_sparse_sm120.py", "FlashInferMLASparseSM120Impl", ("_workspace_buffer",)),
    Row(_ATTENTION + "b12x.py", "B12xPagedAttentionImpl", ("_decode_plans", "_verify_plans")),
    Row(_ATTENTION + "turboquant_attn.py", "TurboQuantAttentionImpl", ("_arange_cache", "_cu_2", "_cu_2_q", "_cu_2_k")),
    Row(_ATTENTION + "ultraquant_attn.py", "UltraQuantAttentionImpl", ("_arange_cache", "_cu_2")),
    # Of the KV cache: views of it under other names, and flags for which of its entries count.
    Row(_ATTENTION + "triton_attn.py", "TritonAttentionImpl", ("_k_scale_cache", "_v_scale_cache"), in_steps=False),
    Row("models/minimax_m3/amd/model.py", "MiniMaxM3SparseAttention", ("kv_cache_k", "kv_cache_v"), in_steps=False),
    Row(
        "model_executor/layers/mamba/mamba_mixer2.py",
        "MambaMixer2",
        ("_replayssm_ring_start", "_replayssm_prev_num_accepted", "_replayssm_prev_query_len"),
        in_steps=False,
    ),
    # Of vLLM 0.33.
    Row(
        "model_executor/layers/quantization/inc/schemes/inc_wna16_moe.py",
        "INCARKWNA16MoEMethod",
        ("rows_per_expert", "unpermuted_row_to_permuted_row", "router_weight_ones"),
        since=(0, 33),
    ),
    Row(_MODELS + "qwen3_xpress.py", "XPressRefinerHead", ("_scratch",), since=(0, 33)),
    Row("models/step5/nvidia/mega_moe.py", "Step5MegaMoEExperts", ("pool",), in_steps=False, since=(0, 33)),
    Row(
        "models/qwen4_exp/amd/qsa.py",
        "Qwen4ExpQSAFlashAttentionImpl",
        ("_octave_mid_o", "_octave_signs"),
        since=(0, 33),
    ),
    Row(_ATTENTION + "rocm_octave_attn.py", "RocmOctaveAttentionImpl", ("_k_signs", "_mid_o"), since=(0, 33)),
    Row(_ATTENTION + "mla/rocm_aiter_mla.py", "AiterMLAImpl", ("_fp8_prefill_one_scale",), since=(0, 33)),
    # Tables: of positions, of columns and experts, of rotations for a quantised KV cache.
    Row(
        _ATTENTION + "turboquant_attn.py",
        "Attention",
        ("_tq_PiT", "_tq_Pi", "_tq_Pi_half", "_tq_centroids", "_tq_midpoints"),
    ),
    Row(_ATTENTION + "ultraquant_attn.py", "Attention", ("_uq_kfull_buf", "_uq_vfull_buf")),
    Row("v1/attention/ops/flydsl_turboquant_decode.py", "Attention", ("_tq_PiT_f32", "_tq_centroids_c")),
    Row(
        "v1/attention/ops/flydsl_ultraquant_decode.py",
        "Attention",
        ("_ultraquant_PiT_f32", "_ultraquant_PiT_perm_f32"),
    ),
    Row(
        "v1/attention/ops/triton_turboquant_decode.py",
        "Attention",
        ("_tq_mid_o_buf", "_tq_output_buf", "_tq_lse_buf"),
    ),
    Row(_MODELS + "pixtral.py", "VisionTransformer", ("_freqs_cis",)),
    Row(_MODELS + "qwen3_vl.py", "Qwen3_VisionTransformer", ("_rot_pos_ids_cache",)),
    Row(_MODELS + "qwen2_5_vl.py", "Qwen2_5_VisionTransformer", ("_rope_by_thw_cache",)),
    Row(_MODELS + "openpangu_vl.py", "OpenPanguVisionRotaryEmbedding", ("_freqs_cached",)),
    Row(_MODELS + "kimi_k25_vit.py", "Rope2DPosEmbRepeated", ("freqs_cis",)),
    Row(_MODELS + "minicpmv.py", "Resampler2_5", ("pos_embed",)),  # larger ones for larger pictures
    Row(_MODELS + "minicpmv.py", "Resampler4_5", ("temporal_pos_embed",)),
    Row(_MODELS + "phi4mm_utils.py", "AbsolutePositionalEncoding", ("pe",)),
    Row(_MODELS + "cohere_asr.py", "PositionalEncoding", ("pe",)),
    Row(_MODELS + "gemma3n_mm.py", "Gemma3nForConditionalGeneration", ("_audio_padding_toks_cache",)),
    Row(_MODELS + "gemma4_mm.py", "Gemma4ForConditionalGeneration", ("_suppress_token_ids_cache",)),
    Row("models/dots3_note/nvidia/vision_attention.py", "VisionRotaryEmbedding", ("freqs_cache",)),
    Row("models/dots3_note/nvidia/audio_encoder.py", "RotaryEmbedding", ("_cache",)),
    Row("models/inkling/nvidia/moe.py", "InklingSinkExperts", ("_unit",)),
    Row("models/inkling/nvidia/moe.py", "InklingSinkExpertsLinear", ("_col_expert",)),
    Row("models/inkling/nvidia/logits_processor.py", "InklingLogitsProcessor", ("_logits_zero",)),
    Row("models/inkling/nvidia/mtp.py", "InklingMTP", ("_logits_zero",)),
    Row("models/kimi_k3/amd/mla.py", "KimiK3MultiHeadLatentAttentionWrapper", ("_identity_rope",)),
    Row("model_executor/layers/fused_moe/b12x.py", "B12xExperts", ("_unit_scales",), in_steps=False),
    *(
        Row("model_executor/layers/quantization/mxfp4.py", owner, ("_cache_permute_indices",), in_steps=False)
        for owner in ("Mxfp4MoEMethod", "GptOssMxfp4MoEMethod")
    ),
)  # fmt: skip

_SCALES = ("bmm1_scale", "bmm2_scale")
FROM_NUMBERS: tuple[Row, ...] = (
    Row(_ATTENTION + "flashinfer.py", "FlashInferImpl", _SCALES),
    Row(_ATTENTION + "mla/flashinfer_mla.py", "FlashInferMLAImpl", _SCALES),
    Row(_ATTENTION + "mla/flashinfer_mla_sparse.py", "FlashInferMLASparseImpl", _SCALES),
    Row(_ATTENTION + "mla/tokenspeed_mla.py", "TokenspeedMLAImpl", ("softmax_scale", "output_scale")),
)


@dataclass(frozen=True, slots=True)
class FromWeights:
    """An attribute that a step fills, or a flag that it sets, when it has made something out of weights. The layer has
    it from its construction on. `applies` says whether this one will."""

    file: str
    owner: str
    key: str
    made: str
    applies: Callable[[Any], bool] = lambda _: True


FROM_WEIGHTS: tuple[FromWeights, ...] = (
    FromWeights(
        "model_executor/layers/rotary_embedding/fope.py",
        "FourierRotaryEmbedding",
        "update_cache",
        "its table of positions",
    ),
    FromWeights(
        "model_executor/layers/attention/static_sink_attention.py",
        "StaticSinkAttention",
        "sink_populated",
        "keys and values of the sink, which stay in the KV cache,",
    ),
    FromWeights(
        "model_executor/layers/fused_moe/runner/moe_runner.py",
        "MoERunner",
        "_combined_gate_weight",
        "one weight of two gates",
        lambda runner: bool(getattr(runner, "_fse_fuse_gate", True)),
    ),
    FromWeights("models/glm5next/common/attention.py", "Indexer", "_wp_fp32", "a float32 copy"),
    FromWeights(
        "models/glm5next/common/kda.py", "Glm5NextLinearAttention", "_merged_conv_weight", "one weight of three"
    ),
)
"""Attention fused with quantisation (`_o_scale_float`, FlashInfer) is refused by its flag: `engine.vllm.start`."""


def _index(rows: tuple[Row, ...]) -> dict[str, dict[str, Row]]:
    """By attribute, then by class."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        for key in row.keys:
            found.setdefault(key, {})[row.owner] = row
    return found


_WEIGHT_FREE_BY_KEY, _FROM_NUMBERS_BY_KEY = _index(WEIGHT_FREE), _index(FROM_NUMBERS)


def is_weight_free(owner: Any, key: Any, tensor: Any) -> bool:
    """Whether `tensor`, which attribute `key` of `owner` is or leads to, does not depend on the version."""
    row = _row(_WEIGHT_FREE_BY_KEY, owner, key)
    return row is not None and (not row.in_steps or not isinstance(tensor, torch.Tensor) or tensor.is_inference())


def is_from_numbers(owner: Any, key: str) -> bool:
    """Whether a step computes this number from others that are exchanged."""
    return _row(_FROM_NUMBERS_BY_KEY, owner, key) is not None


def in_no_table(places: Mapping[str, Holding]) -> dict[str, Holding]:
    """Of what a live model has in addition to what loading makes, the numbers and tensors that are in no table, by
    name."""
    return {
        name: place
        for name, place in places.items()
        if isinstance(place.value, float | torch.Tensor)
        and not (isinstance(place.value, torch.Tensor) and place.value.numel() == 0)
        and not is_from_numbers(place.owner, place.key)
        and not is_weight_free(place.owner, place.key, place.value)
    }


def from_weights(owners: Mapping[str, Any]) -> Iterator[str]:
    """The paths of values on these objects that steps make, or have made, from weights."""
    names = {row.owner for row in FROM_WEIGHTS}
    for path, owner in owners.items():
        kinds = {kind.__name__ for kind in type(owner).__mro__} & names
        for row in FROM_WEIGHTS if kinds else ():
            if row.owner in kinds and hasattr(owner, row.key) and row.applies(owner):
                yield f"{path}.{row.key}: the first step makes {row.made} from weights"


def _row(rows: Mapping[str, Mapping[str, Row]], owner: Any, key: Any) -> Row | None:
    by_owner = rows.get(key) if isinstance(key, str) else None
    if by_owner is None:
        return None
    names = ["", *(kind.__name__ for kind in type(owner).__mro__)]
    return next((by_owner[name] for name in names if name in by_owner), None)


_MAX_NAMED: Final = 8


def check_listed(made: Mapping[str, Holding], live: Mapping[str, Holding], *, copied: bool) -> None:
    """Raises ValueError naming numbers and tensors that a push would not renew. `made`: what steps may have made;
    `live`: all holdings of the model; `copied`: an exchange copies contents, so that views of weights change with
    them."""
    unknown = in_no_table(made)
    if unknown and copied:
        memory = _memory_of(place for name, place in live.items() if name not in made)
        unknown = {name: place for name, place in unknown.items() if _address(place) not in memory}
    if unknown:
        names = sorted(unknown)
        raise ValueError(
            f"steps have made {', '.join(names[:_MAX_NAMED])} ({len(names)} in all) since the model was loaded: a push "
            "would not renew it, and it may depend on weights"
        )


def _memory_of(places: Iterable[Holding]) -> frozenset[int]:
    """Where the storages of these tensors begin."""
    return frozenset(address for address in map(_address, places) if address is not None)


def _address(place: Holding) -> int | None:
    return address_of(place.value) if isinstance(place.value, torch.Tensor) else None


class MadeSince:
    """A model as it is now, to find what steps make on it until a commit, which may be minutes later.

    An exchange was built for what the model had then. To look at a whole model takes too long for a pause. This looks
    at those attributes alone that were None, and for objects with more attributes than then: about a millisecond for a
    model of 1,000 modules.
    """

    def __init__(self, live: nn.Module) -> None:
        self._then: list[tuple[str, Any, dict[str, Any], int, list[str]]] = []
        for path, owner in owners(live).items():
            attributes = vars(owner)
            absent = [key for key, value in list(attributes.items()) if value is None]
            self._then.append((path, owner, attributes, len(attributes), absent))

    def check(self) -> None:
        """Raises RuntimeError naming what was made since, if it may depend on weights."""
        made = {f"{path}.{key}": Holding(owner, "__dict__", key, value) for path, owner, key, value in self._new()}
        try:
            check_listed(made, {}, copied=False)
        except ValueError as error:
            raise RuntimeError(f"the version was prepared before that: push it again: {error}") from error

    def _new(self) -> Iterator[tuple[str, Any, str, Any]]:
        for path, owner, attributes, size, absent in self._then:
            # A step takes away no attribute that it does not make again.
            keys = absent if len(attributes) == size else list(attributes)[size:] + absent
            for key in keys:
                value = attributes.get(key)
                if value is not None and isinstance(value, torch.Tensor | float) and key not in NOT_WEIGHTS:
                    yield path, owner, key, value
