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
# Small enough to try the program on a CPU within seconds.
_SMALL: dict[str, Any] = {  # Any: JSON values
    **LLAMA_8B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
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
_SMALL_GPT_OSS: dict[str, Any] = {  # Any: JSON values
    **_GPT_OSS_20B,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
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
    "llama-70b": _LLAMA_70B,
    "llama-8b": LLAMA_8B,
    "llama-8b-int4": {**LLAMA_8B, "quantization_config": _INT4},
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-235b-a22b": _QWEN3_235B_A22B,
    "small": _SMALL,
    "small-int4": {**_SMALL, "quantization_config": _INT4},
    "small-gpt-oss": _SMALL_GPT_OSS,
    "small-experts": _SMALL_EXPERTS,
}


def save_model(folder: Path, shape: dict[str, Any]) -> None:  # Any: JSON values
    """Write a configuration of this shape, and a tokenizer; there are no weights."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_TOKENIZER / name, folder)
    (folder / "config.json").write_text(json.dumps(shape))
