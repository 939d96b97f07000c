"""Edited fields of config.json: rejected, or read as transformers reads them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import EngineConfig
from pagedray.errors import CheckpointError
from tests.workers.reference import CPU, NUM_TOKENS, reference_logits, run, save_checkpoint
from tests.workers.reference_cases import CASES
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.load_weights import load_weights, with_stored_head

SAMPLE = 5
"""Edits of each configuration that run each time; all of them are slow tests."""
# The section is not read; transformers does not find the tensors of some classes without a type,
# and does not apply MPT's maximum.
UNEDITED = {"vision_config", "model_type", "alibi_bias_max"}
WORDS = ("", "x", "relu", "gelu", "linear", "dynamic", "default", "mrope", "yarn")
# Fields of some families, with values that would change the result.
ADDED: dict[str, Any] = {
    "attention_bias": True,
    "attn_logit_softcapping": 3.0,
    "clip_qkv": 0.2,
    "decoder_sparse_step": 2,
    "final_logit_softcapping": 2.0,
    "head_dim": 16,
    "hidden_act": "gelu",
    "is_causal": False,
    "layer_rope_theta": [0.0, 30.0, 30.0],
    "layer_types": ["sliding_attention"] * 3,
    "llama_4_scaling_beta": 0.3,
    "logit_scale": 2.0,
    "max_window_layers": 1,
    "mlp_bias": True,
    "mlp_only_layers": [0],
    "mrope_section": [4, 1, 1],
    "no_rope_layers": [0, 1, 1],
    "norm_topk_prob": True,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 1,
    "original_max_position_embeddings": 11,
    "partial_rotary_factor": 0.5,
    "query_pre_attn_scalar": 5,
    "rms_norm_eps": 0.1,
    "rope_local_base_freq": 5.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 77.0,
    "shared_intermediate_size": 12,
    "sliding_window": 4,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": True,
    "use_sliding_window": True,
}

FieldPath = tuple[str, ...]


def edits_of(values: dict[str, Any]) -> list[tuple[FieldPath, object]]:
    """Return paths of fields and other values of them; `...` removes one."""
    places: list[FieldPath] = [(), ("text_config",)] if "text_config" in values else [()]
    return [
        *((path, other) for path, value in fields_of(values) for other in other_values(value)),
        *(((*place, field), value) for place in places for field, value in ADDED.items()),
    ]


def fields_of(values: dict[str, Any], place: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    """Yield the path of each field, also in sections, and its value."""
    for field, value in values.items():
        if field in UNEDITED:
            continue
        yield (*place, field), value
        if isinstance(value, dict):
            yield from fields_of(value, (*place, field))


def other_values(value: object) -> Iterator[object]:
    """Yield values that a field may be changed to."""
    yield from (..., None)
    match value:
        case bool():
            yield not value
        case int():
            yield from (value * 2, value + 1, 1, 0, float(value))
        case float():
            yield from (value * 2, value / 2, 1.0, 0.0)
        case str():
            yield from WORDS
        case list():
            yield from ([], value[::-1], value[:-1])
        case dict():
            yield {}
        case _:
            yield from (True, 3, 2.0, "x")


def edited(values: dict[str, Any], path: FieldPath, value: object) -> dict[str, Any]:
    """Return the values with one of them changed."""
    result = copy.deepcopy(values)
    place = result
    for section in path[:-1]:
        place = place[section]
    if value is ...:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value
    return result


def our_logits(folder: Path) -> torch.Tensor | None:
    """Return what we compute, or None if we reject the file."""
    try:
        model_config = read_model_config(folder, dtype="float32")
        if model_config.max_positions < NUM_TOKENS:
            return None
        config = with_stored_head(EngineConfig(model=model_config))
        model = Decoder(config.model, SoloGroup(), backend=TorchSDPABackend, device=CPU)
        load_weights(model, config)
    except CheckpointError:
        return None
    return run(model, SoloGroup())


def their_logits(folder: Path) -> torch.Tensor | None:
    """Return what transformers computes, or None if it fails."""
    try:
        return reference_logits(folder)
    # Each class fails in its own way.
    except Exception:
        return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_edits", [SAMPLE, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_edited_fields_are_rejected_or_read_as_transformers_reads_them(
    name: str, num_edits: int | None, tmp_path: Path
) -> None:
    save_checkpoint(name, tmp_path)
    path = tmp_path / "config.json"
    original = json.loads(path.read_text())
    wrong = []
    num_equal = 0
    edits = edits_of(original)
    for place, value in random.Random(name).sample(edits, num_edits or len(edits)):
        path.write_text(json.dumps(edited(original, place, value)))
        ours = our_logits(tmp_path)
        theirs = None if ours is None else their_logits(tmp_path)
        if ours is None or theirs is None:
            continue
        if torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
            num_equal += 1
        else:
            wrong.append((place, value))
    assert not wrong
    # A few edits may all be rejected.
    assert num_edits is not None or num_equal > len(edits) / 10
