"""The section `quantization_config` of config.json, up to the formats of layers."""

from __future__ import annotations

import json
from pathlib import Path

from pagedray.errors import CheckpointError
from tests.hostile.fuzz.scratch import scratch_folder
from tests.hostile.fuzz.target import Target, check_message
from tests.system.server_process import TINY_LLAMA
from workers.models.families.registry import read_model_config

_FOLDER = scratch_folder()
_TINY = json.loads((TINY_LLAMA / "config.json").read_text())
_CONFIG = json.dumps({**_TINY, "quantization_config": None}).encode()
_ATTENTION = tuple(f"model.layers.27.self_attn.{name}_proj" for name in "qkv")
_EXPERTS = tuple(f"model.layers.27.mlp.{name}_proj" for name in ("gate", "up"))


def run(data: bytes) -> None:
    """Return the formats of some layers, or CheckpointError."""
    section = b'"quantization_config": null'
    assert section in _CONFIG
    Path(_FOLDER, "config.json").write_bytes(
        _CONFIG.replace(section, b'"quantization_config": %b' % data)
    )
    try:
        quantization = read_model_config(_FOLDER).quantization
        if quantization is not None:
            for layers in (_ATTENTION, _EXPERTS):
                quantization.format_of(layers)
    except CheckpointError as error:
        check_message(error)


_FP8_WEIGHTS = {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True}
_FP8_INPUTS = {"type": "float", "num_bits": 8, "strategy": "token", "dynamic": True}
_INT4_WEIGHTS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
_TENSORS = {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*gate$"]}
_SEEDS: tuple[dict[str, object], ...] = (
    {
        **_TENSORS,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _FP8_WEIGHTS,
                "input_activations": {**_FP8_INPUTS, "symmetric": True},
            }
        },
    },
    {
        **_TENSORS,
        "config_groups": {
            "group_0": {"targets": [r"re:model\.layers\.\d+\.mlp.*"], "weights": _INT4_WEIGHTS},
            "group_1": {
                "targets": ["model.layers.0.self_attn.q_proj"],
                "weights": {**_FP8_WEIGHTS, "strategy": "block", "block_structure": [128, 128]},
                "input_activations": {**_FP8_INPUTS, "strategy": "group", "group_size": 128},
            },
        },
    },
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True},
    {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True,
     "modules_to_not_convert": ["model.layers.0", "k_proj"]},
)  # fmt: skip

TARGET = Target(
    run=run,
    seeds=tuple(json.dumps(one).encode() for one in _SEEDS),
    words=(
        *(b'"re:', b"(a+)+$", b".*.*.*", b"(.|.)*x", b"{99999999999}", b"(?=", b"(?<=", b"\\\\1"),
        *(b"((((", b"[^.]+", b"-1", b"null", b"{}", b"[]", b"1e308", b'"ignore":', b'"targets":'),
        *(b'"group"', b'"tensor"', b'"static"', b'"actorder":"group"', b'"kv_cache_scheme":'),
    ),
    max_bytes=1024,
)
