"""Edited fields of `config.json`, read as transformers reads the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedray.config import EngineConfig
from pagedray.errors import CheckpointError
from tests.workers.models.families.config_json import read_config
from tests.workers.reference import (
    CPU,
    loaded_model,
    reference_logits,
    run,
    save_checkpoint,
)
from workers.decoder_worker import DecoderWorker
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.load_weights import with_stored_head

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of a configuration; `...` removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: one for key, one in values.items() if one is not ...}))


def check_logits(folder: Path) -> torch.Tensor:
    """Compare this folder's logits with those of transformers, and return them."""
    group = SoloGroup()
    logits = run(loaded_model(folder, group), group)
    torch.testing.assert_close(logits, reference_logits(folder), rtol=1e-4, atol=1e-4)
    return logits


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {"rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 3.0}},
        {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
        {"rope_parameters": LLAMA3, "original_max_position_embeddings": 16},
        {
            "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64},
            "original_max_position_embeddings": 16,
        },
        {"rope_parameters": LLAMA3},
    ],
)
def test_rope_is_that_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    save_checkpoint("llama-6-heads-3-kv", tmp_path)
    group = SoloGroup()
    before = run(loaded_model(tmp_path, group), group)
    edit(tmp_path, **changes)
    assert not torch.allclose(check_logits(tmp_path), before, atol=1e-2)


@pytest.mark.parametrize("window", [..., None, 5])
def test_windows_of_qwen_are_those_of_transformers(window: object, tmp_path: Path) -> None:
    from transformers import AutoConfig

    save_checkpoint("qwen2-windows-on-later-layers", tmp_path)
    edit(tmp_path, sliding_window=window, layer_types=...)
    theirs = AutoConfig.from_pretrained(tmp_path)
    windows = [
        theirs.sliding_window if kind == "sliding_attention" else None
        for kind in theirs.layer_types
    ]
    assert read_model_config(tmp_path).sliding_windows == (() if window is None else tuple(windows))


def untie(folder: Path, head: torch.Tensor | None = None) -> None:
    """Store a head, which is a copy of the embedding if there is none."""
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if head is None else head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_stored_head_wins_over_the_tied_embedding(tmp_path: Path) -> None:
    save_checkpoint("llama-3-heads-1-kv-tied-linear", tmp_path)
    untie(tmp_path, torch.randn(131, 24))
    config = EngineConfig(model=read_model_config(tmp_path))
    worker = DecoderWorker(config, SoloGroup(), CPU)
    worker.load_weights(lambda done, total: None)
    model = worker._model
    assert model is not None
    assert not model.config.has_tied_embeddings
    logits = run(model, SoloGroup())
    torch.testing.assert_close(logits, reference_logits(tmp_path), rtol=1e-4, atol=1e-4)


def test_a_stored_copy_of_the_embedding_stays_tied(tmp_path: Path) -> None:
    save_checkpoint("llama-3-heads-1-kv-tied-linear", tmp_path)
    config = EngineConfig(model=read_model_config(tmp_path))
    assert with_stored_head(config) is config
    untie(tmp_path)
    assert with_stored_head(config) is config


def test_a_stored_head_of_another_shape_is_named(tmp_path: Path) -> None:
    save_checkpoint("llama-3-heads-1-kv-tied-linear", tmp_path)
    untie(tmp_path, torch.randn(130, 24))
    config = EngineConfig(model=read_model_config(tmp_path))
    worker = DecoderWorker(config, SoloGroup(), CPU)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight has shape \[130, 24\]"):
        worker.load_weights(lambda done, total: None)


@pytest.mark.parametrize("value", [False, None])
@pytest.mark.parametrize("name", ["llama-5-heads", "bloom-6-heads"])
def test_a_model_that_is_not_causal_is_rejected(name: str, value: object, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    assert read_config(tmp_path, json.loads((tmp_path / "config.json").read_text()), is_causal=True)
    edit(tmp_path, is_causal=value)
    with pytest.raises(CheckpointError, match="is_causal must be true"):
        read_model_config(tmp_path)
