"""Configurations of small multimodal models around those of their text."""

import json
from pathlib import Path
from typing import Any

import transformers

TEXT_TYPES = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "mistral3": ("mistral", "ministral3"),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_vl": ("qwen3_vl_text",),
}
"""The values of `model_type` of a multimodal model's text, by its own."""
_SHAPE = {"hidden_size": 32, "intermediate_size": 32}
_LLAVA_SHAPE = _SHAPE | {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_SHAPE = _SHAPE | {"depth": 1, "num_heads": 2}
_VISION: dict[str, dict[str, Any]] = {
    "gemma3": _LLAVA_SHAPE,
    "gemma4": _SHAPE
    | {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "position_embedding_size": 16,
    },
    "gemma4_unified": {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 8},
    "mistral3": _LLAVA_SHAPE | {"model_type": "pixtral", "head_dim": 16},
    "qwen2_5_vl": _QWEN_SHAPE,
    "qwen3_5": _QWEN_SHAPE | {"num_position_embeddings": 16},
    "qwen3_5_moe": _QWEN_SHAPE | {"num_position_embeddings": 16},
    "qwen3_vl": _QWEN_SHAPE | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
_AUDIO: dict[str, dict[str, Any]] = {
    "gemma4": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "output_proj_dims": 32,
        "subsampling_conv_channels": [4, 4],
    },
    "gemma4_unified": {"audio_embed_dim": 32},
}


def multimodal_config(
    model_type: str, text: dict[str, Any], *, is_tied: bool
) -> transformers.PreTrainedConfig:
    """Return the configuration of a model with this text part and a small vision part."""
    vision = dict(_VISION[model_type])
    if model_type.startswith("qwen"):
        vision["out_hidden_size"] = text["hidden_size"]
    sections = {"text_config": text, "vision_config": vision}
    if model_type in _AUDIO:
        sections["audio_config"] = _AUDIO[model_type]
    return transformers.AutoConfig.for_model(model_type, **sections, tie_word_embeddings=is_tied)


def transformers_class(folder: Path) -> Any:  # Any: transformers has no types
    """Return the class of transformers that a checkpoint names."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name)
