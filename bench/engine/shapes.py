"""Shapes of models, as their configurations have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

__all__ = ["LLAMA_8B", "SHAPES", "save_model"]

_ROOT = Path(__file__).resolve().parents[2]
_TOKENIZER = _ROOT / "examples" / "tiny-llama"
_PUBLISHED = _ROOT / "tests" / "workers" / "models" / "families" / "published"
LLAMA_8B: dict[str, Any] = {  # Any: JSON values
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_LLAMA_70B: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_INT4: dict[str, Any] = {  # Any: JSON values
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": False,
    "sym": True,
}
_QWEN3_30B_A3B: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
}
_QWEN3_235B_A22B: dict[str, Any] = {  # Any: JSON values
    **_QWEN3_30B_A3B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
}
_GPT_OSS_20B: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "quantization_config": {"quant_method": "mxfp4"},
}
_GPT_OSS_120B: dict[str, Any] = {  # Any: JSON values
    **_GPT_OSS_20B,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
_QWEN3_5_9B: dict[str, Any] = {  # Any: JSON values
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_QWEN3_5_4B: dict[str, Any] = {  # Any: JSON values
    **_QWEN3_5_9B,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "tie_word_embeddings": True,
}
_QWEN3_5_08B: dict[str, Any] = {  # Any: JSON values
    **_QWEN3_5_4B,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
}
_QWEN3_5_35B_A3B: dict[str, Any] = {  # Any: JSON values
    **_QWEN3_5_9B,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_LFM2_5_12B: dict[str, Any] = {  # Any: JSON values
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 2048,
    "block_ff_dim": 12288,
    "block_auto_adjust_ff_dim": True,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "conv_L_cache": 3,
    "conv_bias": False,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "vocab_size": 65536,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_NEMOTRON_3_NANO: dict[str, Any] = {  # Any: JSON values
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "mlp_hidden_act": "relu2",
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Small enough to try the program on a CPU within seconds, with up to eight ranks.
_SMALL: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
}
_SMALL_EXPERTS: dict[str, Any] = {  # Any: JSON values
    **_SMALL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
_SMALL_HYBRID: dict[str, Any] = {  # Any: JSON values
    **_QWEN3_5_08B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "vocab_size": 4096,
}
_SMALL_NEMOTRON: dict[str, Any] = {  # Any: JSON values
    **_NEMOTRON_3_NANO,
    "hidden_size": 256,
    "hybrid_override_pattern": "MEM*E",
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "n_groups": 2,
    "n_routed_experts": 16,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 256,
    "vocab_size": 4096,
}
_SMALL_GPT_OSS: dict[str, Any] = {  # Any: JSON values
    **_GPT_OSS_20B,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "vocab_size": 4096,
}


def _published(name: str) -> dict[str, Any]:  # Any: JSON values
    """Return the text part of a published config.json, by the name of its copy."""
    config: dict[str, Any] = json.loads((_PUBLISHED / f"{name}.json").read_text())["config"]
    text = config.get("text_config", config)
    return {
        **text,
        "architectures": [_TEXT_CLASSES.get(text["model_type"], config["architectures"][0])],
    }


_TEXT_CLASSES = {"gemma4_text": "Gemma4ForCausalLM"}
SHAPES = {
    "gemma-4-26b-a4b": _published("gemma-4-26b-a4b"),
    "gemma-4-31b": _published("gemma-4-31b"),
    "gpt-oss-120b": _GPT_OSS_120B,
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-20b-bf16": {**_GPT_OSS_20B, "quantization_config": None},
    "lfm2.5-1.2b": _LFM2_5_12B,
    "llama-70b": _LLAMA_70B,
    "llama-8b": LLAMA_8B,
    "llama-8b-int4": {**LLAMA_8B, "quantization_config": _INT4},
    "nemotron-3-nano": _NEMOTRON_3_NANO,
    "qwen3.5-0.8b": _QWEN3_5_08B,
    "qwen3.5-4b": _QWEN3_5_4B,
    "qwen3.5-9b": _QWEN3_5_9B,
    "qwen3.5-35b-a3b": _QWEN3_5_35B_A3B,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-235b-a22b": _QWEN3_235B_A22B,
    "small": _SMALL,
    "small-int4": {**_SMALL, "quantization_config": _INT4},
    "small-hybrid": _SMALL_HYBRID,
    "small-nemotron": _SMALL_NEMOTRON,
    "small-gpt-oss": _SMALL_GPT_OSS,
    "small-experts": _SMALL_EXPERTS,
}


def save_model(folder: Path, shape: dict[str, Any]) -> None:  # Any: JSON values
    """Write a configuration of this shape, and a tokenizer; there are no weights."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_TOKENIZER / name, folder)
    (folder / "config.json").write_text(json.dumps(shape))
