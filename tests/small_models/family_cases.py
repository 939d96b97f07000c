"""A configuration of each family beyond those of `checkpoints`, for whole engines."""

import random

from tests.small_models.checkpoints import CASES, Case

YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
MOE_CASES = (
    Case(
        name="qwen3-moe",
        family="Qwen3Moe",
        more={
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    Case(
        name="glm4-moe",
        family="Glm4Moe",
        more={
            "head_dim": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "use_qk_norm": True,
        },
    ),
    Case(
        name="mixtral-window",
        family="Mixtral",
        more={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 11},
    ),
    Case(
        name="olmoe-whole-norms",
        family="Olmoe",
        more={"num_experts": 8, "num_experts_per_tok": 3},
    ),
    Case(
        name="granite-moe",
        family="GraniteMoe",
        more={
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    Case(
        name="granite-moe-sinks",
        family="GraniteMoeSWA",
        more={
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.4,
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case(
        name="gpt-oss-windows",
        family="GptOss",
        more={
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 11,
            "swiglu_limit": 1.5,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    Case(
        name="granite-moe-shared",
        family="GraniteMoeShared",
        has_tied_embeddings=True,
        embedding_scale=0.3,
        more={
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
    ),
)
_LONG = {"max_position_embeddings": 1024}
_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_DELTA_TYPES = ["linear_attention", "full_attention", "linear_attention"]
HYBRID_CASES = (
    Case(
        name="lfm2-convolutions",
        family="Lfm2",
        has_tied_embeddings=True,
        embedding_scale=0.3,
        more=_LONG
        | {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "block_multiple_of": 8,
        },
    ),
    Case(
        name="lfm2-moe",
        family="Lfm2Moe",
        more=_LONG
        | _EXPERTS
        | {"layer_types": ["conv", "conv", "full_attention"], "num_dense_layers": 1},
    ),
    Case(
        name="qwen3_5-delta-rules",
        family="Qwen3_5",
        more=_LONG
        | _DELTA
        | {"num_hidden_layers": 4, "layer_types": [*_DELTA_TYPES, "linear_attention"]},
    ),
    Case(
        name="qwen3_5-moe",
        family="Qwen3_5Moe",
        more=_LONG
        | _DELTA
        | _EXPERTS
        | {"layer_types": _DELTA_TYPES[1:] * 2, "shared_expert_intermediate_size": 40}
        | {"num_hidden_layers": 4},
    ),
    Case(
        name="qwen3-next",
        family="Qwen3Next",
        more=_LONG
        | _DELTA
        | _EXPERTS
        | {
            "layer_types": _DELTA_TYPES,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
    ),
    Case(
        name="granite-hybrid",
        family="GraniteMoeHybrid",
        more=_LONG
        | {
            "layer_types": _DELTA_TYPES,
            "mamba_n_heads": 8,
            "mamba_d_head": 12,
            "mamba_d_state": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
            "attention_multiplier": 0.4,
        },
    ),
    Case(
        name="nemotron-h",
        family="NemotronH",
        more=_LONG
        | {
            "layers_block_type": [
                *("linear_attention", "moe", "linear_attention", "full_attention", "mlp"),
                "linear_attention",
            ],
            "head_dim": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 16,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
        },
    ),
    Case(
        name="falcon-h1",
        family="FalconH1",
        more=_LONG
        | {
            "head_dim": 16,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_rms_norm": True,
            "key_multiplier": 0.7,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.6, 1.2, 0.9, 1.4, 0.7],
            "mlp_multipliers": [0.8, 1.2],
        },
    ),
    Case(
        name="qwen3_5-text",
        family="Qwen3_5",
        more=_LONG
        | _DELTA
        | {
            "model_type": "qwen3_5_text",
            "layer_types": _DELTA_TYPES,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        },
    ),
    Case(
        name="qwen3_5-moe-text",
        family="Qwen3_5Moe",
        has_tied_embeddings=True,
        more=_LONG
        | _DELTA
        | _EXPERTS
        | {
            "model_type": "qwen3_5_moe_text",
            "layer_types": _DELTA_TYPES,
            "shared_expert_intermediate_size": 16,
        },
    ),
)
"""Models with recurrent layers, which have tests of their own."""
_MORE_CASES = (
    Case(
        name="granite-multipliers",
        family="Granite",
        more={
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    Case(
        name="olmo2-whole-norms",
        family="Olmo2",
    ),
    Case(
        name="olmo3-two-ropes",
        family="Olmo3",
        more={
            "sliding_window": 11,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    Case(
        name="ministral3-growing-queries",
        family="Ministral3",
        more={"head_dim": 8, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.4}},
    ),
    Case(
        name="mistral3-text",
        family="Mistral3",
        more={"model_type": "mistral", "head_dim": 8, "sliding_window": 13},
    ),
    Case(
        name="gemma3-text",
        family="Gemma3",
        num_heads=4,
        num_kv_heads=1,
        has_tied_embeddings=True,
        embedding_scale=0.1,
        more={
            "model_type": "gemma3_text",
            "head_dim": 16,
            "sliding_window": 9,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case(
        name="qwen2_5_vl-text",
        family="Qwen2_5_VL",
        more={
            "model_type": "qwen2_5_vl_text",
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
    ),
    Case(
        name="qwen3_vl-text",
        family="Qwen3VL",
        has_tied_embeddings=True,
        more={
            "model_type": "qwen3_vl_text",
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
    ),
    Case(
        name="smollm3-windows",
        family="SmolLM3",
        more={"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 9},
    ),
    Case(
        name="ministral-two-kinds",
        family="Ministral",
        more={
            # Transformers has no default.
            "head_dim": 8,
            "sliding_window": 11,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    Case(
        name="cohere2-parallel",
        family="Cohere2",
        more={
            "sliding_window": 10,
            "logit_scale": 0.5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Case(
        name="glm-half-heads",
        family="Glm",
        more={"head_dim": 8},
    ),
    Case(
        name="glm4-four-norms",
        family="Glm4",
        num_heads=4,
        num_kv_heads=1,
        more={"head_dim": 16},
    ),
    Case(
        name="starcoder2-window",
        family="Starcoder2",
        more={"sliding_window": 12},
    ),
    Case(
        name="seed-oss",
        family="SeedOss",
        more={"head_dim": 16},
    ),
    Case(
        name="ernie-neighbors",
        family="Ernie4_5",
        more={"head_dim": 16},
    ),
    Case(
        name="gemma-one-kv-head",
        family="Gemma",
        num_heads=4,
        num_kv_heads=1,
        has_tied_embeddings=True,
        embedding_scale=0.1,
        more={"head_dim": 16},
    ),
    Case(
        name="llama-yarn",
        family="Llama",
        more={"rope_parameters": YARN},
    ),
)
GEMMA4_CASES = (
    Case(
        name="gemma4-shared-embeddings",
        family="Gemma4",
        num_heads=4,
        num_kv_heads=1,
        has_tied_embeddings=True,
        embedding_scale=0.1,
        more={
            "head_dim": 16,
            "global_head_dim": 16,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "sliding_window": 9,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 131,
            "final_logit_softcapping": 20.0,
        },
    ),
    Case(
        name="gemma4-two-shapes",
        family="Gemma4",
        num_heads=4,
        has_tied_embeddings=True,
        embedding_scale=0.1,
        more={
            "head_dim": 8,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"] * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": 9,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 131,
        },
    ),
    Case(
        name="gemma4-experts",
        family="Gemma4",
        has_tied_embeddings=True,
        embedding_scale=0.1,
        more={
            "head_dim": 16,
            "global_head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "attention_k_eq_v": True,
            "sliding_window": 11,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
)
_MORE_GEMMA4_CASES = (
    Case(
        name="gemma4-text",
        family="Gemma4",
        num_heads=4,
        has_tied_embeddings=True,
        embedding_scale=0.1,
        more={
            "model_type": "gemma4_text",
            "head_dim": 8,
            "global_head_dim": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 1,
            "sliding_window": 5,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 131,
        },
    ),
    Case(
        name="gemma4_unified",
        family="Gemma4Unified",
        num_heads=4,
        num_kv_heads=1,
        has_tied_embeddings=True,
        embedding_scale=0.1,
        more={"head_dim": 16, "global_head_dim": 16, "sliding_window": 16},
    ),
    Case(
        name="gemma4_unified-text",
        family="Gemma4Unified",
        num_heads=4,
        has_tied_embeddings=True,
        embedding_scale=0.1,
        more={
            "model_type": "gemma4_unified_text",
            "head_dim": 8,
            "global_head_dim": 8,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            # With a window of 1, transformers reads keys outside of it from its cache.
            "sliding_window": 2,
        },
    ),
)
_DENSE_CASES = (*CASES, *_MORE_CASES)
ALL_CASES = (*_DENSE_CASES, *MOE_CASES, *GEMMA4_CASES, *_MORE_GEMMA4_CASES)
SAMPLED_CASES = (
    *random.Random(16).sample(_DENSE_CASES, 4),
    *random.Random(15).sample(MOE_CASES, 1),
    *GEMMA4_CASES,
)
"""Those that run each time; the others are slow tests."""
