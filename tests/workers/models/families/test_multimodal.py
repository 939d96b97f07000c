"""The text of multimodal checkpoints: their files, and the layouts in which they are published."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedray.config import EngineConfig
from pagedray.errors import CheckpointError
from pagedray.model_config import RopeConfig
from tests.workers.models.families.config_json import SHAPE, read_config, written
from tests.workers.reference import loaded_model, reference_logits, run, save_checkpoint
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.load_weights import with_stored_head

TEXT = SHAPE | {"num_key_value_heads": 3}
GEMMA3 = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": TEXT}
MISTRAL3 = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": TEXT}
QWEN2_5_VL = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": TEXT}
QWEN3_VL = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": TEXT}
BASES = [GEMMA3, MISTRAL3, QWEN2_5_VL, QWEN3_VL]
OTHER_MODULES = (
    r"vision_tower|multi_modal_projector|visual|audio_tower|embed_(vision|audio)|vision_embedder"
)


def plain(name: str) -> str:
    """Return the name of a tensor in transformers 5, without its first `model.`."""
    name = re.sub(r"^language_model\.lm_head", "lm_head", name)
    name = re.sub(r"^language_model\.model\.", "language_model.", name)
    name = re.sub(r"^model\.(embed_tokens|layers|norm)", r"language_model.\1", name)
    return name.removeprefix("model.")


def by_module(name: str) -> str:
    """Return it as transformers 5 names it."""
    return name if name.startswith("lm_head") else f"model.{name}"


def by_part(name: str) -> str:
    """Return it as Gemma-3 and Mistral-Small are published."""
    if name.startswith("lm_head"):
        return f"language_model.{name}"
    return name.replace("language_model.", "language_model.model.")


def by_decoder(name: str) -> str:
    """Return it as Qwen2.5-VL is published."""
    return name.replace("language_model.", "model.")


def rename(folder: Path, layout: Callable[[str], str]) -> None:
    """Store the tensors in another layout."""
    path = folder / "model.safetensors"
    tensors = {layout(plain(name)): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("layout", [by_module, by_part, by_decoder])
@pytest.mark.parametrize(
    "name",
    [
        "mistral3-window",
        "gemma3-with-vision",
        "qwen2_5_vl-mrope",
        "qwen3_vl-interleaved-mrope",
        "qwen3_vl-biases-tied",
        "gemma4-with-vision-and-audio",
        "gemma4_unified-with-vision",
    ],
)
def test_every_layout_is_loaded_without_the_vision_part(
    name: str,
    layout: Callable[[str], str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_checkpoint(name, tmp_path)
    exact = reference_logits(tmp_path)
    rename(tmp_path, layout)
    stored = load_file(tmp_path / "model.safetensors")
    num_others = sum(bool(re.search(OTHER_MODULES, key)) for key in stored)
    caplog.set_level(logging.INFO, "workers.weights.checkpoint")
    logits = run(loaded_model(tmp_path, SoloGroup()), SoloGroup())
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)
    assert num_others > 5
    assert f"Skipped {num_others} unused tensors in {tmp_path}" in caplog.text


@pytest.mark.parametrize("name", ["gemma4-with-vision-and-audio", "gemma4-shared-embeddings"])
def test_keys_and_values_that_no_layer_of_gemma4_reads_are_skipped(
    name: str, tmp_path: Path
) -> None:
    save_checkpoint(name, tmp_path)
    exact = reference_logits(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    query = next(key for key in tensors if key.endswith("layers.3.self_attn.q_proj.weight"))
    more = {query.replace("q_proj", f"{kind}_proj"): torch.ones(16, 24) for kind in "kv"}
    more[query.replace("q_proj", "k_norm")] = torch.ones(8)
    save_file(tensors | more, path)
    logits = run(loaded_model(tmp_path, SoloGroup()), SoloGroup())
    torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)
    save_file(tensors | {query.replace("q_proj", "q"): torch.ones(8)}, path)
    with pytest.raises(CheckpointError, match=r"unexpected tensor \S+layers\.3\.self_attn\.q\."):
        loaded_model(tmp_path, SoloGroup())


@pytest.mark.parametrize(
    "extra",
    [
        "audio_tower.conv.weight",
        "visuals.weight",
        "model.vision.weight",
        "language_model.vision_tower.weight",
    ],
)
def test_any_other_tensor_is_rejected(extra: str, tmp_path: Path) -> None:
    save_checkpoint("mistral3-window", tmp_path)
    rename(tmp_path, by_part)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {extra: torch.zeros(48)}, path)
    with pytest.raises(CheckpointError, match=rf"unexpected tensor {re.escape(extra)}, which"):
        loaded_model(tmp_path, SoloGroup())


def test_the_same_tensor_in_two_layouts_is_rejected(tmp_path: Path) -> None:
    save_checkpoint("mistral3-window", tmp_path)
    rename(tmp_path, by_part)
    path = tmp_path / "model.safetensors"
    twice = {"model.language_model.norm.weight": torch.zeros(48)}
    save_file(load_file(path) | twice, path)
    with pytest.raises(CheckpointError, match=r"unexpected tensor \S+norm\.weight, which"):
        loaded_model(tmp_path, SoloGroup())


def test_a_plain_decoder_has_no_vision_tensors(tmp_path: Path) -> None:
    save_checkpoint("llama-5-heads", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"visual.weight": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"unexpected tensor visual\.weight"):
        loaded_model(tmp_path, SoloGroup())


def test_a_missing_tensor_of_the_text_is_named(tmp_path: Path) -> None:
    save_checkpoint("mistral3-window", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["language_model.model.norm.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is missing"):
        loaded_model(tmp_path, SoloGroup())


def test_a_stored_head_wins_over_the_default_of_a_tied_one(tmp_path: Path) -> None:
    save_checkpoint("mistral3-window", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["tie_word_embeddings"]
    path.write_text(json.dumps(values))
    config = EngineConfig(model=read_model_config(tmp_path))
    assert config.model.has_tied_embeddings
    assert not with_stored_head(config).model.has_tied_embeddings


def test_gemma3_may_leave_out_what_equals_a_default(tmp_path: Path) -> None:
    left_out = ("vocab_size", "num_attention_heads", "max_position_embeddings")
    text = {key: value for key, value in TEXT.items() if key not in left_out}
    config = read_config(tmp_path, GEMMA3, text_config=text | {"num_key_value_heads": 4})
    assert (config.vocab_size, config.num_heads, config.max_positions) == (262208, 8, 131072)
    assert config.sliding_windows == (4096,) * 4
    assert config.has_tied_embeddings


def test_fields_of_qwen2_5_vl_may_be_at_the_top_level(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "rope_theta": 3e5,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    }
    nested = read_config(tmp_path, QWEN2_5_VL, text_config=TEXT | more)
    flat = read_config(tmp_path, QWEN2_5_VL | TEXT | more, text_config=...)
    assert flat == nested
    assert flat.rope == RopeConfig(theta=3e5)
    # Transformers 4 writes both.
    assert read_config(tmp_path, QWEN2_5_VL | TEXT, text_config=TEXT | more) == nested


@pytest.mark.parametrize("base", BASES)
def test_fields_of_images_are_ignored(base: dict[str, Any], tmp_path: Path) -> None:
    config = read_config(tmp_path, base, vision_config={"depth": 3}, image_token_id=5)
    assert config == read_config(tmp_path, base)


@pytest.mark.parametrize("base", BASES)
def test_dtype_and_end_tokens_may_be_in_either_place(base: dict[str, Any], tmp_path: Path) -> None:
    fields = {"dtype": "float16", "eos_token_id": [3, 4]}
    inner = read_config(tmp_path, base, text_config=TEXT | fields)
    outer = read_config(tmp_path, base, **fields)
    assert inner == outer
    assert (outer.dtype, outer.eos_token_ids) == ("float16", (3, 4))


@pytest.mark.parametrize(
    ("base", "is_tied"), [(GEMMA3, True), (MISTRAL3, True), (QWEN2_5_VL, False), (QWEN3_VL, False)]
)
def test_the_top_level_ties_embeddings(base: dict[str, Any], is_tied: bool, tmp_path: Path) -> None:
    assert read_config(tmp_path, base).has_tied_embeddings == is_tied
    for value in (True, False):
        assert read_config(tmp_path, base, tie_word_embeddings=value).has_tied_embeddings == value


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"text_config": ...}, "text_config.hidden_size is missing"),
        ({"text_config": 5}, "text_config must be an object, not 5"),
        ({"text_config": TEXT | {"model_type": "mamba"}}, "text_config.model_type must be one of"),
        ({"text_config": TEXT | {"score_offset": 2}}, "text_config.score_offset is not a field of"),
        ({"text_config": TEXT | {"is_causal": False}}, "text_config.is_causal must be true"),
        ({"is_causal": False}, "config.json: is_causal must be true"),
        ({"hidden_size": 64}, "hidden_size is not a field of"),
        ({"audio_config": {"depth": 3}}, "audio_config is not a field of"),
        ({"text_config": TEXT | {"rope_scaling": {"type": "axial"}}}, "text_config.rope_scaling"),
    ],
)
def test_what_is_not_supported_is_named(
    base: dict[str, Any], changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    written(tmp_path, base, **changes)
    if changes == {"text_config": ...} and base is QWEN2_5_VL:
        part = "config.json: hidden_size is missing"
    with pytest.raises(CheckpointError, match=re.escape(part)):
        read_model_config(tmp_path)


def test_a_soft_cap_of_logits_is_rejected_beside_vision(tmp_path: Path) -> None:
    written(tmp_path, GEMMA3, text_config=TEXT | {"final_logit_softcapping": 30.0})
    with pytest.raises(CheckpointError, match=r"final_logit_softcapping must be null, not 30\.0"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("base", [GEMMA3, MISTRAL3])
def test_null_unties_embeddings(base: dict[str, Any], tmp_path: Path) -> None:
    assert not read_config(tmp_path, base, tie_word_embeddings=None).has_tied_embeddings


def test_another_head_size_of_qwen2_5_vl_is_rejected(tmp_path: Path) -> None:
    written(tmp_path, QWEN2_5_VL, text_config=TEXT | {"head_dim": 16})
    with pytest.raises(CheckpointError, match=r"text_config\.head_dim must be 8, not 16"):
        read_model_config(tmp_path)
