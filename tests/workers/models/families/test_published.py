"""Configuration files as they are published, at full size."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.errors import CheckpointError
from pagedray.model_config import ModelConfig
from scripts.published_models import (
    DOCUMENT,
    PublishedFile,
    document_with_table,
    more_published_files,
    published_files,
    written_config,
)
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup

META = torch.device("meta")
REJECTED = {
    "deepseek-v3",
    "glm-4-9b",
}
FILES = {file.name: file for file in published_files()}
MORE = {file.name: file for file in more_published_files()}
ALL = FILES | MORE
LOADED = [name for name in FILES if name not in REJECTED]
DECODERS = [name for name in LOADED if not name.startswith("bge-")]

Shapes = dict[str, tuple[int, ...]]


def shapes_of_transformers(file: PublishedFile, folder: Path, config: ModelConfig) -> Shapes:
    """Return the tensors of the text model that transformers makes of a file."""
    model_class = getattr(transformers, file.config["architectures"][0])
    with META:
        model = model_class(transformers.AutoConfig.from_pretrained(folder))
    tensors = model.state_dict()
    if config.experts is not None:
        # They are parameters of all together, but are mostly stored one by one.
        tensors = revert_weight_conversion(model, tensors)
    stored = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if config.experts is not None and config.experts.is_mxfp4:
        stored = with_mxfp4(stored)
    if config.has_tied_embeddings:
        del stored["lm_head.weight"]
    if config.quantization is not None:
        # Transformers adds them when it loads.
        stored |= {
            f"{name}_scale_inv": (-(-shape[0] // 128), -(-shape[1] // 128))
            for name, shape in stored.items()
            if len(shape) == 2 and name.startswith("model.layers.")
        }
    if config.text_tensors is None:
        return stored
    return {
        name.replace("model.language_model.", "model."): shape
        for name, shape in stored.items()
        if name.startswith(("model.language_model.", "lm_head."))
    }


def with_mxfp4(stored: Shapes) -> Shapes:
    """Return the tensors with those of experts in mxfp4, whose inputs are in blocks of 32."""
    shapes: Shapes = {}
    for name, shape in stored.items():
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            num_experts, in_size, out_size = shape
            scales = num_experts, out_size, in_size // 32
            shapes |= {f"{name}_blocks": (*scales, 16), f"{name}_scales": scales}
        else:
            shapes[name] = shape
    return shapes


@pytest.mark.parametrize("name", DECODERS)
def test_the_tensors_are_those_of_transformers_at_full_size(name: str, tmp_path: Path) -> None:
    folder = written_config(FILES[name], tmp_path)
    config = read_model_config(folder)
    model = Decoder(config, SoloGroup(), backend=TorchSDPABackend, device=META)
    shapes = {shard.name: shard.shape for shard in model.weight_shards()}
    assert shapes == shapes_of_transformers(FILES[name], folder, config)


@pytest.mark.parametrize("name", LOADED)
def test_the_context_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    folder = written_config(FILES[name], tmp_path)
    config = read_model_config(folder)
    theirs = transformers.AutoConfig.from_pretrained(folder).get_text_config()
    longest = config.long_context.max_positions if config.long_context else config.max_positions
    # Positions of a RoBERTa begin behind its padding.
    skipped = 0 if config.position_padding_id is None else config.position_padding_id + 1
    assert longest == theirs.max_position_embeddings - skipped


@pytest.mark.parametrize("name", sorted(REJECTED))
def test_what_is_not_supported_is_named(name: str, tmp_path: Path) -> None:
    architecture = FILES[name].config["architectures"][0]
    with pytest.raises(CheckpointError, match=f"{architecture} is not supported") as caught:
        read_model_config(written_config(FILES[name], tmp_path))
    assert "\n" not in str(caught.value)


def test_the_committed_table_is_that_of_the_generator() -> None:
    document = DOCUMENT.read_text()
    assert document_with_table(document) == document


@pytest.mark.parametrize("name", ALL)
def test_every_file_names_its_source(name: str) -> None:
    assert ALL[name].source.endswith((".", ".json"))
    assert ALL[name].config["model_type"]


@pytest.mark.parametrize("name", ALL)
def test_every_copy_is_the_published_text_or_says_what_was_changed(name: str) -> None:
    file = ALL[name]
    if file.changed:
        assert file.changed.endswith(".")
        assert file.sha256 != file.digest
    else:
        assert file.sha256 == file.digest


def test_a_changed_copy_has_another_digest() -> None:
    file = FILES["gpt-oss-20b"]
    assert "torch_dtype" not in file.config
    copy = replace(file, config=file.config | {"torch_dtype": "bfloat16"})
    assert copy.digest != file.sha256


@pytest.mark.parametrize("name", MORE)
def test_more_published_files_are_accepted(name: str, tmp_path: Path) -> None:
    config = read_model_config(written_config(MORE[name], tmp_path))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert (config.num_layers, config.hidden_size) == (
        theirs.num_hidden_layers,
        theirs.hidden_size,
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gpt-oss-20b", "bfloat16"),
        ("gpt-oss-120b", "bfloat16"),
        ("all-minilm-l6-v2", "float32"),
        ("bge-m3", "float32"),
        ("qwen3-8b", "bfloat16"),
        ("qwen3-8b-fp8", "bfloat16"),
        ("e5-mistral-7b", "float16"),
        ("mistral-small-24b", "bfloat16"),
        ("qwen3-vl-4b", "bfloat16"),
    ],
)
def test_the_dtype_of_published_files_without_tensors(
    name: str, dtype: str, tmp_path: Path
) -> None:
    assert read_model_config(written_config(ALL[name], tmp_path)).dtype == dtype
