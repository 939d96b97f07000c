"""A minimal `config.json` of each family, for tests that change single keys."""

import json
from pathlib import Path
from typing import Any

from pagedray.model_config import ModelConfig
from workers.models.families.registry import read_model_config

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
GEMMA2 = SHAPE | {"architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 3}
GEMMA3 = SHAPE | {"architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 3}
SMOLLM3 = SHAPE | {"architectures": ["SmolLM3ForCausalLM"], "num_key_value_heads": 3}
OLMO3 = SHAPE | {"architectures": ["Olmo3ForCausalLM"]}
MINISTRAL3 = SHAPE | {
    "architectures": ["Ministral3ForCausalLM"],
    "num_key_value_heads": 3,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1},
}
PHI3 = SHAPE | {"architectures": ["Phi3ForCausalLM"]}
BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"],
    "vocab_size": 100,
    "n_embed": 48,
    "n_layer": 4,
    "n_head": 6,
}
MPT: dict[str, Any] = {
    "architectures": ["MptForCausalLM"],
    "vocab_size": 100,
    "d_model": 48,
    "n_layers": 4,
    "n_heads": 6,
}


def written(folder: Path, base: dict[str, Any], **changes: Any) -> Path:
    """Write a configuration; `...` removes a key."""
    values = {key: value for key, value in (base | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def read_config(folder: Path, base: dict[str, Any], **changes: Any) -> ModelConfig:
    """Return the model configuration that is read from it."""
    return read_model_config(written(folder, base, **changes))
