"""Modules of sentence-transformers that run here, and those that are rejected by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cluster.serving.validation.embedding_validator import longest_text
from pagedray.errors import CheckpointError
from pagedray.model_config import DenseModule
from workers.models.config_json.sentence_modules import dense_modules

if TYPE_CHECKING:
    from pathlib import Path


def write_modules(folder: Path, *kinds: str) -> None:
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{one}",
            "type": f"sentence_transformers.models.{one}",
        }
        for index, one in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def test_modules_that_run_here_are_accepted(tmp_path: Path) -> None:
    dense_modules(tmp_path, 8)
    write_modules(tmp_path, "Transformer", "Pooling", "Normalize")
    dense_modules(tmp_path, 8)


@pytest.mark.parametrize("kind", ["LSTM", "LayerNorm", "WeightedLayerPooling", "CNN"])
def test_a_module_that_would_change_vectors_is_rejected(kind: str, tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", "Pooling", kind)
    with pytest.raises(CheckpointError, match=rf"2\.type names the module '{kind}'; supported"):
        dense_modules(tmp_path, 8)


def write_dense(folder: Path, name: str, **settings: object) -> None:
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(settings))


def test_linear_layers_after_pooling_are_read_in_their_order(tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    identity = "torch.nn.modules.linear.Identity"
    settings = {"out_features": 32, "bias": False, "activation_function": identity}
    write_dense(tmp_path, "2_Dense", in_features=8, **settings)
    write_dense(tmp_path, "3_Dense", in_features=32, out_features=6)
    first, second = dense_modules(tmp_path, 8)
    assert first == DenseModule(
        folder="2_Dense", in_size=8, out_size=32, has_bias=False, activation="identity"
    )
    assert (second.out_size, second.has_bias, second.activation) == (6, True, "tanh")


@pytest.mark.parametrize(
    ("kinds", "settings", "part"),
    [
        (("Pooling", "Dense"), {"in_features": 9, "out_features": 4}, "in_features must be 8"),
        (("Pooling", "Dense"), {"in_features": 8}, "out_features is missing"),
        (
            ("Pooling", "Dense"),
            {"in_features": 8, "out_features": 4, "activation_function": "x.GELU"},
            "activation_function must be one of torch.nn.modules.activation.Tanh",
        ),
        (
            ("Pooling", "Dense"),
            {"in_features": 8, "out_features": 4, "module_input_name": "token_embeddings"},
            "module_input_name must be one of sentence_embedding",
        ),
        (
            ("Pooling", "Dense"),
            {"in_features": 8, "out_features": 4, "residual": True},
            "residual is not a field of Dense",
        ),
        (("Pooling", "Normalize", "Dense"), {}, "type names Dense after Normalize"),
        (("Dense", "Pooling"), {}, "type names Pooling after Dense"),
    ],
)
def test_a_linear_layer_that_is_not_supported_is_named(
    kinds: tuple[str, ...], settings: dict[str, object], part: str, tmp_path: Path
) -> None:
    write_modules(tmp_path, "Transformer", *kinds)
    write_dense(tmp_path, f"{kinds.index('Dense') + 1}_Dense", **settings)
    with pytest.raises(CheckpointError, match=part):
        dense_modules(tmp_path, 8)


@pytest.mark.parametrize("path", ["..", "../2_Dense", "/etc", "", "2_Dense/..", "a\0b", "2_D\n"])
def test_a_folder_elsewhere_is_rejected(path: str, tmp_path: Path) -> None:
    module = {"path": path, "type": "sentence_transformers.models.Dense"}
    (tmp_path / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(
        CheckpointError, match=r"0\.path must be a folder such as 2_Dense"
    ) as caught:
        dense_modules(tmp_path, 8)
    assert "\n" not in str(caught.value)


def test_a_linear_layer_without_its_settings_is_named(tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", "Pooling", "Dense")
    with pytest.raises(CheckpointError, match=r"2_Dense/config\.json cannot be read"):
        dense_modules(tmp_path, 8)


@pytest.mark.parametrize("text", ["{}", "[1]", "[", '[{"type": 3}]', "[{}]"])
def test_a_broken_list_of_modules_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        dense_modules(tmp_path, 8)


@pytest.mark.parametrize(
    ("settings", "longest"),
    [({}, 512), ({"max_seq_length": 256}, 256), ({"max_seq_length": 4096}, 512)],
)
def test_the_longest_text_is_that_of_the_checkpoint(
    settings: dict[str, object], longest: int, tmp_path: Path
) -> None:
    assert longest_text(tmp_path, 512) == 512
    path = tmp_path / "sentence_bert_config.json"
    path.write_text(json.dumps(settings | {"do_lower_case": False}))
    assert longest_text(tmp_path, 512) == longest


def test_text_that_would_become_lower_case_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(CheckpointError, match="do_lower_case must be false, not true"):
        longest_text(tmp_path, 512)
