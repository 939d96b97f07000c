"""The config.json of a small Llama, with changes."""

import json
from pathlib import Path
from typing import Any

from pagedray.model_config import ModelConfig
from tests.workers.models.families.config_json import SHAPE
from workers.models.families.registry import (
    read_model_config,
)

LLAMA = SHAPE | {
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def written_llama(folder: Path, **changes: Any) -> Path:
    values = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def read_llama(folder: Path, **changes: Any) -> ModelConfig:
    return read_model_config(written_llama(folder, **changes))
