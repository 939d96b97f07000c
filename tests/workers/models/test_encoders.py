"""BERT and BART against Transformers, over texts of several lengths in one batch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.batch import Pooling, StepPlan, TextBatch
from pagedray.errors import CheckpointError, StartupError
from pagedray.model_config import Dtype, Task
from tests.attention.dense_reference import relative_error
from tests.workers.models.encoder_reference import (
    BartRun,
    bart_reference,
    bert_reference,
    loaded_bart,
    loaded_bert,
    run_bert,
    save_bart,
    save_bert,
    save_dense,
    save_embedding_gemma,
    save_xlm_roberta,
    with_dense,
)
from tests.workers.models.two_ranks import on_two_ranks
from tests.workers.reference import save_checkpoint, token_ids
from workers.embedding_worker import EmbeddingWorker
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup

NUM_TOKENS = 20
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


@pytest.mark.parametrize(
    ("save", "dtype", "tolerance"),
    [
        (save_bert, "float32", 1e-5),
        (save_xlm_roberta, "float32", 1e-5),
        (save_bert, "bfloat16", 3e-2),
    ],
)
def test_hidden_states_equal_those_of_transformers(
    save: Callable[[Path], None], dtype: Dtype, tolerance: float, tmp_path: Path
) -> None:
    save(tmp_path)
    group = SoloGroup()
    outputs = run_bert(loaded_bert(tmp_path, group, dtype), group)
    for output, reference in zip(outputs, bert_reference(tmp_path), strict=True):
        assert relative_error(output, reference) < tolerance


@pytest.mark.parametrize("has_scaled_embedding", [False, True])
def test_greedy_tokens_of_bart_equal_those_of_transformers(
    has_scaled_embedding: bool, tmp_path: Path
) -> None:
    save_bart(tmp_path, has_scaled_embedding=has_scaled_embedding)
    group = SoloGroup()
    outputs = BartRun(loaded_bart(tmp_path, group), group).greedy(NUM_TOKENS)
    expected = bart_reference(tmp_path, NUM_TOKENS)
    assert len({token for tokens in expected for token in tokens}) > 10
    assert outputs == expected


def test_two_ranks_of_bert_compute_what_transformers_computes(tmp_path: Path) -> None:
    save_bert(tmp_path)
    reference = bert_reference(tmp_path)
    for outputs in on_two_ranks(lambda group: run_bert(loaded_bert(tmp_path, group), group)):
        for output, expected in zip(outputs, reference, strict=True):
            assert relative_error(output, expected) < 1e-5


def test_two_ranks_of_bart_sample_what_transformers_samples(tmp_path: Path) -> None:
    save_bart(tmp_path, has_scaled_embedding=True)
    expected = bart_reference(tmp_path, NUM_TOKENS)
    outputs = on_two_ranks(
        lambda group: BartRun(loaded_bart(tmp_path, group), group).greedy(NUM_TOKENS)
    )
    assert outputs == [expected, expected]


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


def vectors(
    folder: Path, pooling: Pooling, task: Task | None = None, *, is_normalized: bool = False
) -> torch.Tensor:
    """Return the vectors of all texts, which one step computes."""
    options = EngineOptions(device="cpu", num_threads=1, dtype="float32", task=task)
    worker = EmbeddingWorker(engine_config(folder, options), SoloGroup())
    worker.load_weights(lambda done, total: None)
    worker.allocate_cache(0, 0)
    batch = TextBatch(texts(), pooling, is_normalized=is_normalized)
    output = worker.launch(StepPlan(0, [], texts=batch)).output()
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


@pytest.mark.parametrize("window", [4, 6, 9, 200])
def test_embedding_gemma_attends_in_both_directions_and_has_linear_layers(
    window: int, tmp_path: Path
) -> None:
    save_embedding_gemma(tmp_path, window=window)
    found = vectors(tmp_path, "mean")
    expected = with_dense(tmp_path, reference(tmp_path, "mean"))
    assert found.shape == (len(texts()), 20)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    config = read_model_config(tmp_path)
    assert (config.task, config.vector_size) == ("embed", 20)
    with pytest.raises(StartupError, match="cannot generate; its task can be embed"):
        read_model_config(tmp_path, task="generate")
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"No model\.safetensors .* found in .*2_Dense"):
        vectors(tmp_path, "mean")


def test_vectors_are_normalized_after_the_linear_layers(tmp_path: Path) -> None:
    save_embedding_gemma(tmp_path, window=6)
    plain, normalized = (
        vectors(tmp_path, "mean", is_normalized=is_normalized) for is_normalized in (False, True)
    )
    torch.testing.assert_close(normalized, functional.normalize(plain, dim=1))


def test_a_tensor_of_a_linear_layer_that_is_wrong_is_named(tmp_path: Path) -> None:
    save_embedding_gemma(tmp_path, window=6)
    save_file({"linear.weight": torch.ones(3, 48)}, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"linear\.weight has shape \[3, 48\]"):
        vectors(tmp_path, "mean")


def test_a_bert_with_a_linear_layer_embeds(tmp_path: Path) -> None:
    save_bert(tmp_path)
    hidden_size = read_model_config(tmp_path).hidden_size
    plain = vectors(tmp_path, "cls")
    listed = [
        {"path": f"{index}_{one}", "type": f"sentence_transformers.models.{one}"}
        for index, one in enumerate(("Transformer", "Pooling", "Dense", "Normalize"))
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    save_dense(tmp_path / "2_Dense", (hidden_size, hidden_size), bias=True)
    dense = load_file(tmp_path / "2_Dense" / "model.safetensors")
    expected = functional.linear(plain, dense["linear.weight"], dense["linear.bias"]).tanh()
    torch.testing.assert_close(vectors(tmp_path, "cls"), expected)


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
