"""`type` and `rope_type` of every family, in each spelling, read as transformers reads them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from pagedray.errors import CheckpointError
from tests.small_models.multimodal import transformers_class
from tests.workers.reference import save_checkpoint
from tests.workers.reference_cases import CASES
from workers.layers.rope import inverse_frequencies
from workers.models.families.registry import read_model_config

# The first case of each type of model that has rope.
FAMILIES = {
    case["model_type"]: name
    for name, case in reversed(CASES.items())
    if case["model_type"] not in ("bloom", "mpt", "nemotron_h")
}
# Transformers cannot scale Mixtral's rope without a head size.
FAMILIES["mixtral"] = "mixtral-head-size"
FAMILIES["granitemoehybrid"] = "granitemoehybrid-dense-rope"
_FACTORS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "default": {},
    "mrope": {"mrope_section": [1, 1, 2]},
}
SAMPLE = 8
"""Spellings of each family that run each time; all of them are slow tests."""
MIN_EQUAL = 15
IN_PUBLISHED_FILES: list[dict[str, Any]] = [
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6},
    {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 8.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e6},
]
_FULL, _WINDOW = "full_attention", "sliding_attention"


def sections() -> list[dict[str, Any]]:
    """Return sections with the keys that name the type, one, both or none."""
    result: list[dict[str, Any]] = []
    for kind, factors in _FACTORS.items():
        other = "linear" if kind == "default" else "default"
        more = {"factor": 3.0} | factors if other == "linear" else factors
        result += [
            {"rope_type": kind} | factors,
            {"type": kind} | factors,
            {"rope_type": kind, "type": kind} | factors,
            {"rope_type": kind, "type": other} | more,
            {"rope_type": other, "type": kind} | more,
            {"rope_type": None, "type": kind} | factors,
            {"type": kind, "rope_theta": 77.0} | factors,
        ]
    return [*result, {"factor": 4.0}, {}, {"rope_theta": 77.0}]


def spellings() -> list[dict[str, Any]]:
    """Return fields of config.json with a section."""
    result: list[dict[str, Any]] = []
    for section in sections():
        result += [
            {"rope_scaling": section},
            {"rope_scaling": section, "rope_theta": 55.0},
            {"rope_parameters": section},
            {"rope_parameters": {_FULL: section, _WINDOW: {"rope_type": "default"}}},
            {"rope_parameters": {_FULL: {"rope_type": "default"}, _WINDOW: section}},
            {"rope_scaling": section, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        ]
    return result


def our_frequencies(folder: Path) -> list[torch.Tensor] | None:
    """Return the frequencies of each rotated layer, with its magnitude, or None if rejected."""
    try:
        config = read_model_config(folder)
    except CheckpointError:
        return None
    ropes = [config.rope_of(layer) for layer in range(config.num_layers)]
    return [
        torch.cat(
            (
                inverse_frequencies(rope, rope.rotary_size or config.head_size),
                torch.tensor([rope.magnitude]),
            )
        )
        for rope in ropes
        if rope is not None
    ]


def their_frequencies(folder: Path) -> list[torch.Tensor] | None:
    """Return the frequencies of rotated layers in transformers, or None if it fails."""
    ours = read_model_config(folder)
    rotated = [ours.rope_of(layer) is not None for layer in range(ours.num_layers)]
    try:
        config = AutoConfig.from_pretrained(folder)
        model = transformers_class(folder)(config)
    # Each class fails in its own way.
    except Exception:
        return None
    rotary = next(
        module
        for module in model.modules()
        if type(module).__name__.endswith("RotaryEmbedding")
        and "Vision" not in type(module).__name__
        and "Pixtral" not in type(module).__name__
    )
    kinds = getattr(config.get_text_config(), "layer_types", None) or [""] * len(rotated)
    result = []
    for kind, is_rotated in zip(kinds, rotated, strict=True):
        prefix = "" if hasattr(rotary, "inv_freq") else f"{kind}_"
        frequencies = getattr(rotary, f"{prefix}inv_freq").float()
        scaling = torch.tensor([float(getattr(rotary, f"{prefix}attention_scaling"))])
        if is_rotated:
            result.append(torch.cat((frequencies, scaling)))
    return result


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_spellings", [SAMPLE, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_types_of_rope_are_rejected_or_read_as_transformers_reads_them(
    model_type: str, num_spellings: int | None, tmp_path: Path
) -> None:
    save_checkpoint(FAMILIES[model_type], tmp_path)
    spelled = spellings()
    wrong, num_equal = [], 0
    for spelling in random.Random(model_type).sample(spelled, num_spellings or len(spelled)):
        ours, theirs = both_frequencies(tmp_path, spelling)
        if ours is None or theirs is None:
            continue
        if are_close(ours, theirs):
            num_equal += 1
        else:
            wrong.append(spelling)
    assert not wrong
    # A few spellings may all be rejected, and Gemma 4 requires the theta of each kind of layer.
    is_any_rejected = num_spellings is not None or "gemma4" in model_type
    assert is_any_rejected or num_equal >= MIN_EQUAL


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model_type", "spelling"),
    [
        # Each family has two spellings, and each spelling two of five families.
        pytest.param(one, two, marks=[] if (row + column) % 5 in (0, 2) else pytest.mark.slow)
        for row, one in enumerate(FAMILIES)
        for column, two in enumerate(IN_PUBLISHED_FILES)
    ],
)
def test_common_spellings_of_rope_are_read_as_transformers_reads_them(
    model_type: str, spelling: dict[str, Any], tmp_path: Path
) -> None:
    save_checkpoint(FAMILIES[model_type], tmp_path)
    ours, theirs = both_frequencies(tmp_path, spelling)
    is_named = model_type not in ("gemma3", "gemma3_text", "olmo3") or "rope_type" in str(spelling)
    # Gemma 4 reads no `rope_scaling`.
    is_supported = model_type not in ("phi3", "ministral3") and "gemma4" not in model_type
    is_accepted = (is_supported and is_named) or (
        model_type == "ministral3" and "yarn" in str(spelling)
    )
    # OLMo-3 has one theta.
    if model_type != "olmo3" or "rope_theta" not in spelling:
        assert (ours is not None) == is_accepted
    assert ours is None or (theirs is not None and are_close(ours, theirs))


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3", "dynamic", "default"])
@pytest.mark.parametrize("name", ["gemma3-two-ropes", "gemma3-with-vision", "olmo3-two-ropes"])
def test_a_type_that_transformers_ignores_is_rejected_by_name(
    name: str, kind: str, key: str, tmp_path: Path
) -> None:
    save_checkpoint(name, tmp_path)
    write_spelling(tmp_path, {"rope_scaling": {key: kind, **_FACTORS[kind]}})
    if key == "rope_type" or kind in ("dynamic", "default"):
        assert read_model_config(tmp_path)
        return
    with pytest.raises(CheckpointError, match=r"rope_scaling\.type has no effect .* rope_type"):
        read_model_config(tmp_path)


def both_frequencies(
    folder: Path, spelling: dict[str, Any]
) -> tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]:
    """Return our frequencies and those of transformers; None for failures."""
    write_spelling(folder, spelling)
    ours = our_frequencies(folder)
    return ours, None if ours is None else their_frequencies(folder)


def write_spelling(folder: Path, spelling: dict[str, Any]) -> None:
    """Replace the rope in a configuration."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    text = values.get("text_config", values)
    for key in ("rope_parameters", "rope_scaling", "rope_theta", "layer_rope_theta"):
        text.pop(key, None)
    if text["model_type"] == "ministral3":
        growth = {"llama_4_scaling_beta": 0.1}
        spelling = {key: add_to(value, growth) for key, value in spelling.items()}
    text |= spelling
    path.write_text(json.dumps(values))


def add_to(value: Any, more: dict[str, Any]) -> Any:  # Any: parsed JSON
    return value | more if isinstance(value, dict) else value


def are_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(
        one.shape == two.shape and torch.allclose(one, two, rtol=1e-4)
        for one, two in zip(ours, theirs, strict=True)
    )
