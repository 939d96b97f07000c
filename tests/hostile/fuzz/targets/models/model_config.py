"""config.json of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path

from pagedray.errors import CheckpointError
from scripts.published_models import published_files
from tests.hostile.fuzz.scratch import scratch_folder
from tests.hostile.fuzz.target import Target, check_message
from tests.system.server_process import TINY_LLAMA
from workers.models.families.registry import read_model_config, supported_architectures

_FOLDER = scratch_folder()


def run(data: bytes) -> None:
    """Return a configuration or CheckpointError."""
    Path(_FOLDER, "config.json").write_bytes(data)
    try:
        read_model_config(_FOLDER)
    except CheckpointError as error:
        check_message(error)


_TINY = json.loads((TINY_LLAMA / "config.json").read_text())
_ROPES: tuple[dict[str, object], ...] = (
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
)  # fmt: skip

TARGET = Target(
    run=run,
    seeds=(
        *(
            json.dumps({**_TINY, "architectures": [one]}).encode()
            for one in supported_architectures()
        ),
        *(json.dumps({**_TINY, "rope_scaling": one}).encode() for one in _ROPES),
        *(json.dumps(file.config).encode() for file in published_files()),
    ),
    words=(
        *(b"1e308", b"1e999", b"-1", b"0", b"true", b"null", b"[]", b"{}", b"0.5", b"NaN"),
        *(b"9" * 30, b'"sliding_window":', b'"layer_types":', b'"rope_scaling":', b'"head_dim":'),
        *(b'"num_key_value_heads":', b'"torch_dtype":', b'"eos_token_id":', b'"hidden_act":'),
        *(b'"text_config":', b'"is_causal":', b'"llama_4_scaling_beta":', b'"mrope_section":'),
    ),
)
