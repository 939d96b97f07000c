"""Decoders that embed: their vectors against the hidden states of Transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from cluster.engine.options.engine_options import EngineOptions, engine_config
from pagedray.batch import EmbedPlan, Pooling
from pagedray.errors import CheckpointError, StartupError
from tests.workers.reference import save_checkpoint, token_ids
from workers.embedding_worker import EmbeddingWorker
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup

if TYPE_CHECKING:
    from pathlib import Path

    from pagedray.model_config import Task

# Ropes of several kinds, windows, capped scores, ALiBi, and tensors that are fused in several ways.
NAMES = (
    "llama-12-heads-4-kv-llama3",
    "mistral-short-window",
    "qwen3-wide-heads",
    "gemma2-capped",
    "bloom-6-heads",
    "mpt-clipped",
    "phi3-longrope-partial",
)


def texts() -> list[list[int]]:
    ids = token_ids().tolist()
    return [ids[:9], ids[3:4], ids, ids[::-1][:16]]


def save_body(folder: Path) -> None:
    """Save a checkpoint again without its output head, as embedding models are published."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    # Any: the library's types are inconsistent here.
    body: Any = model.base_model
    for path in folder.iterdir():
        path.unlink()
    body.save_pretrained(folder)


def vectors(folder: Path, pooling: Pooling, task: Task | None = None) -> torch.Tensor:
    """Return the vectors of all texts, which one step computes."""
    options = EngineOptions(device="cpu", num_threads=1, dtype="float32", task=task)
    worker = EmbeddingWorker(engine_config(folder, options), SoloGroup())
    worker.load_weights(lambda done, total: None)
    worker.allocate_cache(0, 0)
    output = worker.launch(EmbedPlan(0, texts(), pooling, is_normalized=False)).output()
    worker.close()
    flat = np.frombuffer(output.vectors, dtype=np.float32)
    return torch.from_numpy(flat.copy()).view(len(texts()), -1)


def reference(folder: Path, pooling: Pooling) -> torch.Tensor:
    """Return what Transformers computes for each text alone."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    rows = []
    with torch.inference_mode():
        for text in texts():
            hidden = model(torch.tensor([text])).last_hidden_state[0]
            rows.append(hidden[-1] if pooling == "last" else hidden.mean(0))
    return torch.stack(rows)


@pytest.mark.parametrize("name", NAMES)
def test_vectors_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    # With the head, which is not read.
    assert torch.allclose(
        vectors(tmp_path, "mean", "embed"), reference(tmp_path, "mean"), atol=1e-4, rtol=1e-4
    )
    save_body(tmp_path)
    assert torch.allclose(
        vectors(tmp_path, "last"), reference(tmp_path, "last"), atol=1e-4, rtol=1e-4
    )


def test_a_checkpoint_of_sentence_transformers_embeds_by_default(tmp_path: Path) -> None:
    save_checkpoint("qwen3-wide-heads", tmp_path)
    assert read_model_config(tmp_path).task == "generate"
    (tmp_path / "modules.json").write_text(json.dumps([]))
    assert read_model_config(tmp_path).task == "embed"
    assert read_model_config(tmp_path, task="generate").task == "generate"


def test_a_checkpoint_without_a_head_does_not_generate(tmp_path: Path) -> None:
    save_checkpoint("qwen3-wide-heads", tmp_path)
    save_body(tmp_path)
    assert read_model_config(tmp_path).task == "embed"
    with pytest.raises(StartupError, match="cannot generate; its task can be embed"):
        read_model_config(tmp_path, task="generate")


def test_an_unknown_tensor_beside_the_head_is_rejected(tmp_path: Path) -> None:
    save_checkpoint("qwen3-wide-heads", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model.register_parameter("extra", torch.nn.Parameter(torch.ones(2)))
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="unexpected tensor extra"):
        vectors(tmp_path, "last", "embed")
