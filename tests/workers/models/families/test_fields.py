"""Every field of transformers' configuration classes is read, may be ignored, or is rejected."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig

from pagedray.errors import CheckpointError
from tests.small_models.multimodal import TEXT_TYPES
from tests.workers.models.families.config_json import SHAPE
from tests.workers.reference import save_checkpoint
from tests.workers.reference_cases import CASES
from workers.models.config_json.config_file import IGNORED_FIELDS, ConfigFile, reason_to_ignore
from workers.models.config_json.family import Family
from workers.models.families.registry import families, read_model_config

FAMILIES = {family.architecture: family for family in families()}
# What the registry reads for every family.
_COMMON = {"architectures", "model_type", "is_encoder_decoder", "dtype", "torch_dtype"}
_SHAPE = SHAPE | {"num_key_value_heads": 3}
# Those that other families lack.
_LACKS = {
    "BertModel": {"num_key_value_heads"},
    "RobertaModel": {"num_key_value_heads"},
    "BloomForCausalLM": {"num_key_value_heads", "intermediate_size", "max_position_embeddings"},
    "MptForCausalLM": {"num_key_value_heads", "intermediate_size", "max_position_embeddings"},
}
# Those that have no default.
_NEEDS: dict[str, dict[str, Any]] = {
    "Ministral3ForCausalLM": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}
    },
}


def shape_of(architecture: str) -> dict[str, Any]:
    """Return the fields of a minimal configuration."""
    if text_types(FAMILIES[architecture]):
        return {"text_config": _SHAPE}
    lacks = _LACKS.get(architecture, set())
    shape = {field: value for field, value in _SHAPE.items() if field not in lacks}
    return shape | _NEEDS.get(architecture, {})


def text_types(family: Family) -> tuple[str, ...]:
    """Return the values of `model_type` of the text of a multimodal family."""
    return TEXT_TYPES.get(family.model_types[0], ())


def read_by(family: Family, values: dict[str, Any], folder: Path) -> ConfigFile:
    """Return a file that a family has read."""
    file = ConfigFile(folder / "config.json", values)
    family.read(file)
    return file


def unknown_fields(model_type: str, read: frozenset[str]) -> set[str]:
    """Return the fields of a class of transformers that are neither read nor may be ignored."""
    return {
        field.name
        for field in dataclasses.fields(CONFIG_MAPPING[model_type])
        if field.name not in read | _COMMON and reason_to_ignore(field.name) is None
    }


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_field_of_transformers_is_accounted_for(architecture: str, tmp_path: Path) -> None:
    family = FAMILIES[architecture]
    file = read_by(family, shape_of(architecture), tmp_path)
    for model_type in family.model_types:
        assert not unknown_fields(model_type, file.read_keys())


@pytest.mark.parametrize(
    ("architecture", "text_type"),
    [(name, text) for name, family in FAMILIES.items() for text in text_types(family)],
)
def test_every_field_of_the_text_of_a_multimodal_model_is_accounted_for(
    architecture: str, text_type: str, tmp_path: Path
) -> None:
    more = _NEEDS["Ministral3ForCausalLM"] if text_type == "ministral3" else {}
    values = {"text_config": _SHAPE | more | {"model_type": text_type}}
    file = read_by(FAMILIES[architecture], values, tmp_path)
    assert not unknown_fields(text_type, file.section("text_config").read_keys())


def test_defaults_of_generation_are_ignored() -> None:
    for name in GenerationConfig._get_default_generation_params():
        assert reason_to_ignore(name) is not None, name


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_saves_is_accepted_with_any_ignored_field(
    name: str, tmp_path: Path
) -> None:
    save_checkpoint(name, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    expected = read_model_config(tmp_path)
    more = {field: 3.5 for field in IGNORED_FIELDS if field not in values}
    path.write_text(json.dumps(more | values))
    assert read_model_config(tmp_path) == expected


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("value", [True, 0.5, "x", [1], {"a": 1}])
def test_an_unknown_field_is_rejected_by_its_name(
    architecture: str, value: object, tmp_path: Path
) -> None:
    values = shape_of(architecture) | {"architectures": [architecture], "score_offset": value}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"score_offset is not a field of \w+ that is"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "shown"),
    [("a\nb", "'a\\\\nb' is"), ("x" * 200, "'" + "x" * 99 + " is"), ("", " is not")],
)
def test_any_unknown_field_is_shown_in_one_line(field: str, shown: str, tmp_path: Path) -> None:
    values = _SHAPE | {"architectures": ["LlamaForCausalLM"], field: 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=shown) as caught:
        read_model_config(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_an_unknown_field_that_is_off_is_accepted(value: object, tmp_path: Path) -> None:
    values = _SHAPE | {"architectures": ["LlamaForCausalLM"], "score_offset": value}
    (tmp_path / "config.json").write_text(json.dumps(values))
    read_model_config(tmp_path)
