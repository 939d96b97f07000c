"""Families of Qwen with gated delta rules: Qwen3-Next, and Qwen3.5, as 3.6 and 3.8 are too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pagedray.model_config import ModelConfig, MtpLayer, RecurrentConfig, TensorNames, TextTensors
from workers.models.config_json.family import (
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_RECURRENT_WIDTH,
    MAX_SIZE,
    STACKED_NAMES,
    Family,
    base_config,
    experts_of,
    recurrent_layers,
)
from workers.models.config_json.rope_section import with_rope
from workers.models.families.text_part import TEXT_SECTION, as_text_part

if TYPE_CHECKING:
    from pagedray.model_config import ExpertsConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["QWEN3_5", "QWEN3_5_MOE", "QWEN3_5_MOE_TEXT", "QWEN3_5_TEXT", "QWEN3_NEXT"]

_INTERVAL = 4
_ROTARY_FACTOR = 0.25
# The layers that predict several tokens.
_SKIPPED = ("mtp.",)
_MTP = MtpLayer(
    decoder_layer="mtp.layers.{}",
    token_norm="mtp.pre_fc_norm_embedding",
    state_norm="mtp.pre_fc_norm_hidden",
    projection="mtp.fc",
    last_norm="mtp.norm",
)
_NAMES = TensorNames(
    shared_input=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_output="mlp.shared_expert.down_proj",
    shared_gate="mlp.shared_expert_gate",
)
_STACKED_NAMES = replace(
    _NAMES, expert_input=STACKED_NAMES.expert_input, expert_output=STACKED_NAMES.expert_output
)
# As in checkpoints of a model that also reads images.
_TEXT_PREFIXES = (
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
)


def _read_text(file: ConfigFile, *, has_experts: bool) -> ModelConfig:
    """Read the text of any of these families."""
    has_bias = file.flag("attention_bias", False)
    config = base_config(
        file,
        intermediate_key="moe_intermediate_size" if has_experts else "intermediate_size",
        default_intermediate_size=512 if has_experts else None,
        default_num_kv_heads=2 if has_experts else 4,
        default_head_size=256,
    )
    file.reject_unless("attn_output_gate", True)
    file.choice("output_gate_type", ("swish", "silu"), "swish")
    # The width of an MLP has no effect where all layers have experts.
    file.note_read("intermediate_size")
    num_mtp_layers = file.integer("mtp_num_hidden_layers", 1, least=0, most=MAX_LAYERS)
    has_embeddings = file.flag("mtp_use_dedicated_embeddings", False)
    config = replace(
        with_rope(config, file, default_rotary_factor=_ROTARY_FACTOR),
        names=_NAMES,
        text_tensors=TextTensors(_TEXT_PREFIXES, _SKIPPED),
        mtp=_MTP if num_mtp_layers and not has_embeddings else None,
        norm_kind="offset_rms",
        has_qk_norm=True,
        has_attention_gate=True,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        recurrent=_recurrent(file, config.num_layers),
    )
    if not has_experts:
        return config
    return replace(config, stacked_names=_STACKED_NAMES, experts=_experts(file, config))


def _recurrent(file: ConfigFile, num_layers: int) -> RecurrentConfig | None:
    interval = file.integer("full_attention_interval", _INTERVAL, most=MAX_LAYERS)
    layers = recurrent_layers(
        file,
        num_layers,
        "linear_attention",
        by_default=[(layer + 1) % interval != 0 for layer in range(num_layers)],
    )
    num_key_heads = file.integer("linear_num_key_heads", 16, most=MAX_HEADS)
    num_value_heads = file.integer("linear_num_value_heads", 32, most=MAX_HEADS)
    if num_value_heads % num_key_heads:
        raise file.rejection(
            "linear_num_value_heads",
            f"must be a multiple of linear_num_key_heads {num_key_heads}, not {num_value_heads}",
        )
    dtype = file.choice("mamba_ssm_dtype", ("float32", "bfloat16"), "float32")
    recurrent = RecurrentConfig(
        kind="delta_rule",
        layers=layers,
        conv_width=file.integer("linear_conv_kernel_dim", 4, least=2, most=MAX_RECURRENT_WIDTH),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_size=file.integer("linear_key_head_dim", 128, most=MAX_HEAD_SIZE),
        value_size=file.integer("linear_value_head_dim", 128, most=MAX_HEAD_SIZE),
        matrix_dtype="bfloat16" if dtype == "bfloat16" else "float32",
    )
    return recurrent if layers else None


def _experts(file: ConfigFile, config: ModelConfig) -> ExpertsConfig:
    experts = experts_of(
        file,
        default_num=256,
        default_num_chosen=8,
        intermediate_size=config.intermediate_size,
        is_renormalized=True,
    )
    return replace(
        experts,
        shared_size=file.integer("shared_expert_intermediate_size", 512, most=MAX_SIZE),
        has_shared_gate=True,
    )


def _read_qwen3_next(file: ConfigFile) -> ModelConfig:
    """Qwen3-Next: projections of recurrent layers are fused by key heads."""
    config = _read_text(file, has_experts=True)
    assert config.experts is not None
    step = file.integer("decoder_sparse_step", 1, most=MAX_LAYERS)
    dense = file.indices("mlp_only_layers", most=MAX_LAYERS)
    layers = range(config.num_layers)
    dense_layers = tuple(index for index in layers if index in dense or (index + 1) % step)
    recurrent = config.recurrent
    return replace(
        config,
        intermediate_size=file.integer("intermediate_size", 5632, most=MAX_SIZE),
        recurrent=None if recurrent is None else replace(recurrent, is_fused_by_head=True),
        experts=replace(
            config.experts,
            is_renormalized=file.flag("norm_topk_prob", True),
            dense_layers=dense_layers,
        ),
    )


QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM", model_types=("qwen3_next",), reader=_read_qwen3_next
)


def _read_with_images(file: ConfigFile, *, text_type: str, has_experts: bool) -> ModelConfig:
    """Read the text of a model that also reads images."""
    text = file.section(TEXT_SECTION)
    config = _read_text(text, has_experts=has_experts)
    is_tied = file.flag("tie_word_embeddings", config.has_tied_embeddings)
    config = as_text_part(config, file, text, is_tied=is_tied, model_types=(text_type,))
    tensors = config.text_tensors
    assert tensors is not None
    return replace(config, text_tensors=replace(tensors, skipped=(*tensors.skipped, *_SKIPPED)))


def _families(label: str, model_type: str, *, has_experts: bool) -> tuple[Family, Family]:
    """Return the family of a model that also reads images, and that of its text."""
    text_type = f"{model_type}_text"
    whole, text = f"{label}ForConditionalGeneration", f"{label}ForCausalLM"
    read_whole = partial(_read_with_images, text_type=text_type, has_experts=has_experts)
    read_text = partial(_read_text, has_experts=has_experts)
    return (
        Family(architecture=whole, model_types=(model_type,), reader=read_whole),
        Family(architecture=text, model_types=(text_type,), reader=read_text),
    )


QWEN3_5, QWEN3_5_TEXT = _families("Qwen3_5", "qwen3_5", has_experts=False)
QWEN3_5_MOE, QWEN3_5_MOE_TEXT = _families("Qwen3_5Moe", "qwen3_5_moe", has_experts=True)
