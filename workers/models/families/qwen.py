"""Families of Qwen."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import MtpLayer, TextTensors
from workers.models.config_json.family import (
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_SIZE,
    STACKED_NAMES,
    Family,
    base_config,
    experts_of,
    qwen_windows,
)
from workers.models.config_json.rope_section import with_rope
from workers.models.config_json.score_section import SCORE_SUFFIX, has_score_head, with_score
from workers.models.families.text_part import TEXT_SECTION, as_text_part

if TYPE_CHECKING:
    from pagedray.model_config import ExpertsConfig, ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["QWEN2", "QWEN2_5_VL", "QWEN3", "QWEN3_MOE", "QWEN3_VL"]


_MIMO = "MiMoForCausalLM"
_MTP_MIMO = MtpLayer(
    decoder_layer="model.mtp_layers.{}",
    token_norm="model.mtp_layers.0.token_layernorm",
    state_norm="model.mtp_layers.0.hidden_layernorm",
    projection="model.mtp_layers.0.input_proj",
    last_norm="model.mtp_layers.0.final_layernorm",
    puts_state_first=True,
    reads_normed=False,
)


def _read_qwen2(file: ConfigFile) -> ModelConfig:
    """Qwen2: biases on queries, keys and values; optional sliding windows on later layers.

    MiMo is a Qwen2 with layers that predict several tokens.

    """
    config = base_config(file, default_num_kv_heads=32)
    if _MIMO in file.words("architectures"):
        file.reject_unless("attention_bias", True)
        file.note_read("use_mrope")
        num_mtp_layers = file.integer("num_nextn_predict_layers", 0, least=0, most=MAX_LAYERS)
        config = replace(
            config,
            text_tensors=TextTensors((), ("model.mtp_layers.",)),
            mtp=_MTP_MIMO if num_mtp_layers else None,
        )
    return replace(
        with_rope(config, file),
        has_qkv_bias=True,
        sliding_windows=qwen_windows(file, config.num_layers),
    )


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_types=("qwen2", "mimo"),
    reader=_read_qwen2,
    aliases=(_MIMO,),
)


def _read_qwen3(file: ConfigFile) -> ModelConfig:
    """Qwen3: QK norm, and a head size of its own; optional sliding windows on later layers.

    Qwen3-Reranker is a Qwen3 that answers yes or no; converted checkpoints have a head with a
    single score.

    """
    has_attention_bias = file.flag("attention_bias", False)
    file.reject_unless("use_qk_norm", True)
    config = base_config(file, default_num_kv_heads=32, default_head_size=128)
    config = replace(
        with_rope(config, file),
        has_qk_norm=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        sliding_windows=qwen_windows(file, config.num_layers),
    )
    if not has_score_head(file):
        return replace(config, score_head="answer")
    file.note_read("sentence_transformers", "sbert_ce_default_activation_function")
    return with_score(replace(config, score_head="linear"), file)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_types=("qwen3",),
    reader=_read_qwen3,
    aliases=(f"Qwen3{SCORE_SUFFIX}",),
)


def _read_qwen3_moe(file: ConfigFile) -> ModelConfig:
    """Qwen3-MoE: Qwen3 with experts, on all layers or on some of them."""
    has_attention_bias = file.flag("attention_bias", False)
    file.reject_unless("use_qk_norm", True)
    config = base_config(file, default_num_kv_heads=4)
    return replace(
        with_rope(config, file),
        stacked_names=STACKED_NAMES,
        has_qk_norm=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        sliding_windows=_windows_qwen3_moe(file, config.num_layers),
        experts=_experts_qwen3_moe(file, config.num_layers),
    )


def _experts_qwen3_moe(file: ConfigFile, num_layers: int) -> ExpertsConfig:
    experts = experts_of(
        file,
        default_num=128,
        default_num_chosen=8,
        intermediate_size=file.integer("moe_intermediate_size", 768, most=MAX_SIZE),
        is_renormalized=file.flag("norm_topk_prob", False),
    )
    step = file.integer("decoder_sparse_step", 1, most=MAX_LAYERS)
    dense = file.indices("mlp_only_layers", most=MAX_LAYERS)
    layers = range(num_layers)
    return replace(
        experts,
        dense_layers=tuple(index for index in layers if index in dense or (index + 1) % step),
    )


def _windows_qwen3_moe(file: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """Return the window that `use_sliding_window` gives to all layers, unlike that of Qwen3."""
    file.note_read("sliding_window", "max_window_layers")
    if not file.flag("use_sliding_window", False) or file.has_null("sliding_window"):
        return ()
    return (file.integer("sliding_window", 4096, most=MAX_POSITIONS),) * num_layers


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM", model_types=("qwen3_moe",), reader=_read_qwen3_moe
)


def _read_qwen2_5_vl(file: ConfigFile) -> ModelConfig:
    """The text of Qwen2.5-VL, a Qwen2.5. Older files have its fields at the top level."""
    text = file.section(TEXT_SECTION) if TEXT_SECTION in file else file
    config = base_config(text, default_num_kv_heads=8, default_norm_eps=1e-5)
    # Transformers reads no other size.
    text.reject_unless("head_dim", config.hidden_size // config.num_heads)
    config = replace(
        with_rope(config, text, default_theta=1e6),
        has_qkv_bias=True,
        sliding_windows=qwen_windows(text, config.num_layers, default_first=80),
    )
    return as_text_part(
        config,
        file,
        text,
        # Transformers 4 wrote it in either place.
        is_tied=file.flag("tie_word_embeddings", False) or config.has_tied_embeddings,
        model_types=("qwen2_5_vl_text",),
    )


QWEN2_5_VL = Family(
    architecture="Qwen2_5_VLForConditionalGeneration",
    model_types=("qwen2_5_vl",),
    reader=_read_qwen2_5_vl,
)


def _read_qwen3_vl(file: ConfigFile) -> ModelConfig:
    """The text of Qwen3-VL, a Qwen3."""
    text = file.section(TEXT_SECTION)
    has_attention_bias = text.flag("attention_bias", False)
    config = base_config(text, default_num_kv_heads=32, default_head_size=128)
    config = replace(
        with_rope(config, text, default_theta=5e5),
        has_qk_norm=True,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
    )
    return as_text_part(
        config,
        file,
        text,
        is_tied=file.flag("tie_word_embeddings", False),
        model_types=("qwen3_vl_text",),
    )


QWEN3_VL = Family(
    architecture="Qwen3VLForConditionalGeneration", model_types=("qwen3_vl",), reader=_read_qwen3_vl
)
