"""Nemotron-H and Nemotron 3: layers of Mamba-2, attention, an MLP or experts, in any order.

A layer of ours is a mixer and the MLP behind it, if there is one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import (
    ExpertsConfig,
    ModelConfig,
    RecurrentConfig,
    TensorNames,
    TextTensors,
)
from workers.models.config_json.family import (
    MAX_EXPERTS,
    MAX_HEAD_SIZE,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_RECURRENT_WIDTH,
    MAX_SIZE,
    Family,
    base_config,
    check_step_limits,
    scored_experts,
)

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["NEMOTRON_H"]

_NAMES = TensorNames(
    embedding="backbone.embeddings",
    decoder_layer="backbone.layers.{}",
    final_norm="backbone.norm_f",
    attention_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    attention_output="mixer.o_proj",
    recurrent="mixer",
    mlp_norm="norm",
    mlp_input=("mixer.up_proj",),
    mlp_output="mixer.down_proj",
    router="mixer.gate",
    router_bias="mixer.gate.e_score_correction_bias",
    expert_input=("mixer.experts.{}.up_proj.weight",),
    expert_output="mixer.experts.{}.down_proj.weight",
    shared_input=("mixer.shared_experts.up_proj",),
    shared_output="mixer.shared_experts.down_proj",
    latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
)
_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "moe": "moe",
    "mlp": "mlp",
}
# How the weights began, and how transformers computes.
_UNUSED = (
    *("expand", "chunk_size", "mamba_proj_bias", "mamba_ssm_cache_dtype", "num_logits_to_keep"),
    *("rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min"),
    *(
        "use_mamba_kernels",
        "moe_shared_expert_overlap",
        "num_nextn_predict_layers",
        "mtp_layers_block_type",
    ),
    *("num_hidden_layers", "mtp_hybrid_override_pattern", "rope_theta", "partial_rotary_factor"),
)


def _read_nemotron_h(file: ConfigFile) -> ModelConfig:
    kinds = _kinds(file)
    places = _places(file, kinds)
    config = base_config(
        file,
        num_layers=len(places),
        default_num_kv_heads=8,
        default_head_size=128,
        norm_eps_key="layer_norm_epsilon",
        default_norm_eps=1e-5,
    )
    file.note_read(*_UNUSED)
    for key in ("attention_bias", "mlp_bias", "residual_in_fp32"):
        file.reject_unless(key, False)
    file.reject_unless("sliding_window", None)
    file.choice("mlp_hidden_act", ("relu2",), "relu2")
    file.choice("mamba_hidden_act", ("silu",), "silu")
    mixers = [kinds[mixer] for mixer, _ in places]
    mlps = [None if mlp is None else kinds[mlp] for _, mlp in places]
    experts = _experts(file)
    dense = tuple(layer for layer, kind in enumerate(mlps) if kind != "moe")
    return replace(
        config,
        names=_NAMES,
        layer_places=tuple(places),
        text_tensors=TextTensors((), ("mtp.",)),
        rope=None,
        activation="relu2",
        is_mlp_gated=False,
        recurrent=_recurrent(file, mixers),
        experts=replace(experts, dense_layers=dense) if "moe" in mlps else None,
    )


def _kinds(file: ConfigFile) -> list[str]:
    """Return the kind of each layer of the file."""
    pattern, key = file.value("hybrid_override_pattern"), "hybrid_override_pattern"
    given: list[str] = []
    if isinstance(pattern, str):
        given = [_LETTERS.get(letter, letter) for letter in pattern]
    for name in ("layers_block_type", "layer_types"):
        words = file.words(name)
        if words:
            given, key = list(words), name
    if not given:
        raise file.rejection(key, "is missing")
    for layer, kind in enumerate(given):
        if kind not in _KINDS:
            raise file.rejection(
                key,
                f"has {kind[:40]!r} for layer {layer}, which is not supported; use mamba (M), "
                "attention (*), moe (E) or mlp (-)",
            )
    return [_KINDS[kind] for kind in given[:MAX_LAYERS]]


def _places(file: ConfigFile, kinds: list[str]) -> list[tuple[int, int | None]]:
    """Return the layers of the file of each mixer and of the MLP behind it, if there is one."""
    places: list[tuple[int, int | None]] = []
    for layer, kind in enumerate(kinds):
        if kind in ("mamba", "attention"):
            places.append((layer, None))
        elif places and places[-1] == (layer - 1, None):
            places[-1] = layer - 1, layer
        else:
            raise file.rejection(
                "layers_block_type",
                f"has {kind} for layer {layer}, which must follow a layer of mamba or attention",
            )
    return places


def _recurrent(file: ConfigFile, mixers: list[str]) -> RecurrentConfig | None:
    check_step_limits(file)
    num_heads = file.integer("mamba_num_heads", 128, most=MAX_HEADS)
    num_groups = file.integer("n_groups", 8, most=MAX_HEADS)
    if num_heads % num_groups:
        raise file.rejection(
            "n_groups", f"must be a divisor of mamba_num_heads {num_heads}, not {num_groups}"
        )
    has_bias = file.flag("use_bias", False)
    recurrent = RecurrentConfig(
        kind="mamba2",
        layers=tuple(layer for layer, kind in enumerate(mixers) if kind == "mamba"),
        conv_width=file.integer("conv_kernel", 4, least=2, most=MAX_RECURRENT_WIDTH),
        has_conv_bias=file.flag("use_conv_bias", True),
        has_bias=has_bias,
        has_output_bias=has_bias,
        num_key_heads=num_groups,
        num_value_heads=num_heads,
        key_size=file.integer("ssm_state_size", 128, most=MAX_HEAD_SIZE),
        value_size=file.integer("mamba_head_dim", 64, most=MAX_HEAD_SIZE),
    )
    return recurrent if recurrent.layers else None


def _experts(file: ConfigFile) -> ExpertsConfig:
    num_experts = file.integer("n_routed_experts", 8, most=MAX_EXPERTS)
    file.reject_unless("n_shared_experts", 1)
    latent_size = None
    if "moe_latent_size" in file:
        latent_size = file.integer("moe_latent_size", most=MAX_SIZE)
    experts = scored_experts(
        file,
        num_experts=num_experts,
        default_num_chosen=2,
        intermediate_size=file.integer("moe_intermediate_size", 7688, most=MAX_SIZE),
        shared_size=file.integer("moe_shared_expert_intermediate_size", 7688, most=MAX_SIZE),
    )
    return replace(experts, activation="relu2", latent_size=latent_size)


NEMOTRON_H = Family(
    architecture="NemotronHForCausalLM", model_types=("nemotron_h",), reader=_read_nemotron_h
)
