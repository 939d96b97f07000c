"""Configurations of small random checkpoints, by name."""

from __future__ import annotations

from typing import Any

from tests.workers.expert_cases import EXPERT_CASES

__all__ = ["CASES", "EXPERT_PARALLEL_CASES", "TWO_RANK_CASES"]

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}

# Vocabularies are odd, so that two ranks must pad them.
CASES: dict[str, dict[str, Any]] = {
    "llama-6-heads-3-kv": {"model_type": "llama", "heads": 6, "kv_heads": 3},
    "llama-3-heads-1-kv-tied-linear": {
        "model_type": "llama",
        "heads": 3,
        "kv_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": _LINEAR,
    },
    "llama-12-heads-4-kv-llama3": {
        "model_type": "llama",
        "heads": 12,
        "kv_heads": 4,
        "rope_parameters": _LLAMA3,
    },
    "llama-6-heads-2-kv-biases": {
        "model_type": "llama",
        "heads": 6,
        "kv_heads": 2,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama-5-heads": {"model_type": "llama", "heads": 5, "kv_heads": 5, "rms_norm_eps": 1e-2},
    "mistral-short-window": {
        "model_type": "mistral",
        "heads": 6,
        "kv_heads": 1,
        "sliding_window": 7,
    },
    "mistral-no-window-head-size": {
        "model_type": "mistral",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 12,
        "sliding_window": None,
    },
    "qwen2-windows-on-later-layers": {
        "model_type": "qwen2",
        "heads": 12,
        "kv_heads": 2,
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen2-layer-types": {
        "model_type": "qwen2",
        "heads": 6,
        "kv_heads": 6,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3-wide-heads": {"model_type": "qwen3", "heads": 6, "kv_heads": 2, "head_dim": 24},
    "qwen3-biases-one-kv-head": {
        "model_type": "qwen3",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 10,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "gemma2-capped": {
        "model_type": "gemma2",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma2-biases-no-caps": {
        "model_type": "gemma2",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 8,
        "attention_bias": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 9,
    },
    "gemma3-two-ropes": {
        "model_type": "gemma3_text",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "final_logit_softcapping": 7.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
    "bloom-6-heads": {"model_type": "bloom", "heads": 6, "kv_heads": 6},
    "bloom-4-heads-untied": {
        "model_type": "bloom",
        "heads": 4,
        "kv_heads": 4,
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-2,
    },
    "mpt-12-heads": {"model_type": "mpt", "heads": 12, "kv_heads": 12},
    "mpt-clipped": {
        "model_type": "mpt",
        "heads": 4,
        "kv_heads": 4,
        "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.2},
    },
    "llama-yarn": {
        "model_type": "llama",
        "heads": 4,
        "kv_heads": 2,
        "rope_parameters": _YARN,
    },
    "qwen2-yarn-unrounded": {
        "model_type": "qwen2",
        "heads": 4,
        "kv_heads": 2,
        "rope_parameters": _YARN
        | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 4, "factor": 3},
    },
    "llama-dynamic": {
        "model_type": "llama",
        "heads": 4,
        "kv_heads": 2,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 4.0},
    },
    "gemma-one-kv-head": {"model_type": "gemma", "heads": 6, "kv_heads": 1, "head_dim": 10},
    "granite-multipliers": {
        "model_type": "granite",
        "heads": 6,
        "kv_heads": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.3,
        "logits_scaling": 2.5,
    },
    "granite-biases-tied": {
        "model_type": "granite",
        "heads": 4,
        "kv_heads": 1,
        "residual_multiplier": 0.5,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "olmo2-6-heads-2-kv": {"model_type": "olmo2", "heads": 6, "kv_heads": 2},
    "olmo2-one-kv-head-biases": {
        "model_type": "olmo2",
        "heads": 4,
        "kv_heads": 1,
        "attention_bias": True,
    },
    "olmo3-two-ropes": {
        "model_type": "olmo3",
        "heads": 6,
        "kv_heads": 2,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": _YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
    "olmo3-biases": {
        "model_type": "olmo3",
        "heads": 4,
        "kv_heads": 1,
        "attention_bias": True,
        "sliding_window": 5,
        "tie_word_embeddings": True,
    },
    "ministral3-growing-queries": {
        "model_type": "ministral3",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "rope_parameters": _YARN
        | {"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.6},
    },
    "ministral3-window-tied": {
        "model_type": "ministral3",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 8,
        "sliding_window": 6,
        "tie_word_embeddings": True,
        "rope_parameters": _YARN
        | {"original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.2, "mscale": 1.0},
    },
    "mistral3-window": {
        "model_type": "mistral3",
        "text_type": "mistral",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "sliding_window": 7,
    },
    "mistral3-tied-growing-queries": {
        "model_type": "mistral3",
        "text_type": "ministral3",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "rope_parameters": _YARN
        | {"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.6},
    },
    "gemma3-with-vision": {
        "model_type": "gemma3",
        "text_type": "gemma3_text",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": _LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
        },
    },
    "qwen2_5_vl-mrope": {
        "model_type": "qwen2_5_vl",
        "text_type": "qwen2_5_vl_text",
        "heads": 6,
        "kv_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [1, 1, 2]},
    },
    "qwen2_5_vl-tied-windows": {
        "model_type": "qwen2_5_vl",
        "text_type": "qwen2_5_vl_text",
        "heads": 4,
        "kv_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        "rope_parameters": _YARN | {"mrope_section": [2, 1, 1]},
    },
    "qwen3_vl-interleaved-mrope": {
        "model_type": "qwen3_vl",
        "text_type": "qwen3_vl_text",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 12,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 50.0,
            "mrope_section": [2, 2, 2],
            "mrope_interleaved": True,
        },
    },
    "qwen3_vl-biases-tied": {
        "model_type": "qwen3_vl",
        "text_type": "qwen3_vl_text",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": _YARN | {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    },
    "smollm3-every-other-rope": {
        "model_type": "smollm3",
        "heads": 6,
        "kv_heads": 2,
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 6,
    },
    "smollm3-interval": {
        "model_type": "smollm3",
        "heads": 4,
        "kv_heads": 2,
        "no_rope_layer_interval": 3,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "ministral-two-kinds": {
        "model_type": "ministral",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 12,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "cohere2-parallel": {
        "model_type": "cohere2",
        "heads": 6,
        "kv_heads": 2,
        "sliding_window": 6,
        "logit_scale": 0.3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "cohere2-biases-untied": {
        "model_type": "cohere2",
        "heads": 4,
        "kv_heads": 1,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": _LINEAR,
    },
    "glm-half-heads": {"model_type": "glm", "heads": 6, "kv_heads": 2, "head_dim": 8},
    "glm4-four-norms": {
        "model_type": "glm4",
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 16,
        "attention_bias": False,
        "partial_rotary_factor": 0.25,
    },
    "starcoder2-window": {
        "model_type": "starcoder2",
        "heads": 6,
        "kv_heads": 2,
        "sliding_window": 7,
    },
    "starcoder2-no-biases": {
        "model_type": "starcoder2",
        "heads": 4,
        "kv_heads": 1,
        "use_bias": False,
        "tie_word_embeddings": False,
    },
    "seed-oss-biases": {
        "model_type": "seed_oss",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "ernie-biases": {
        "model_type": "ernie4_5",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 10,
        "use_bias": True,
    },
    "phi3-window": {"model_type": "phi3", "heads": 6, "kv_heads": 2, "sliding_window": 7},
    "phi3-longrope-partial": {
        "model_type": "phi3",
        "heads": 4,
        "kv_heads": 1,
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 300.0,
            "short_factor": [1.0, 1.3, 2.0],
            "long_factor": [1.0, 3.0, 5.0],
        },
    },
    **EXPERT_CASES,
}
TWO_RANK_CASES = [
    name
    for name, case in CASES.items()
    if case["heads"] % 2 == 0 and (case["kv_heads"] % 2 == 0 or case["kv_heads"] == 1)
]
EXPERT_PARALLEL_CASES = [
    name
    for name in TWO_RANK_CASES
    if any(CASES[name].get(key, 1) % 2 == 0 for key in ("num_experts", "num_local_experts"))
]
