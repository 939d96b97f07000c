"""Random configurations of Gemma 4 against transformers, on one rank and on two."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedray.errors import CheckpointError
from tests.workers.models.families.config_json import SHAPE, read_config
from tests.workers.models.two_ranks import on_two_ranks
from tests.workers.reference import (
    CPU,
    NUM_TOKENS,
    loaded_model,
    reference_logits,
    run,
    save_checkpoint,
)
from tests.workers.reference_cases import CASES
from workers.models.self_attention import attention_spec
from workers.parallel.group import ParallelGroup, SoloGroup

GEMMA4 = SHAPE | {"architectures": ["Gemma4ForCausalLM"], "num_key_value_heads": 3}
FULL, WINDOW = "full_attention", "sliding_attention"


def random_case(chance: random.Random) -> dict[str, Any]:
    """Return a configuration; layers have keys and values of one shape or of two."""
    kv_heads, head_size = chance.choice((1, 2, 4)), chance.choice((6, 8, 16))
    has_two_shapes = chance.random() < 0.5
    num_layers = chance.randint(3, 7)
    kinds = [chance.choice((FULL, WINDOW)) for _ in range(num_layers - 1)] + [FULL]
    kinds[:2] = chance.sample((FULL, WINDOW), 2)
    case = {
        "model_type": chance.choice(("gemma4_text", "gemma4_text", "gemma4_unified_text")),
        "heads": 4,
        "kv_heads": kv_heads,
        "head_dim": head_size,
        "global_head_dim": chance.choice((4, 10, 24)) if has_two_shapes else head_size,
        "num_hidden_layers": num_layers,
        "layer_types": kinds,
        "num_kv_shared_layers": chance.choice((0, 1, num_layers - 2)),
        "sliding_window": chance.choice((1, 5, 16, 17, 64)),
        "attention_k_eq_v": chance.random() < 0.5,
        "use_double_wide_mlp": chance.random() < 0.5,
        "final_logit_softcapping": chance.choice((None, 5.0)),
        "attention_bias": chance.random() < 0.3,
        "tie_word_embeddings": chance.random() < 0.5,
        "rope_parameters": {
            FULL: {
                "rope_type": chance.choice(("default", "proportional")),
                "rope_theta": 500.0,
                "partial_rotary_factor": chance.choice((0.25, 0.5, 1.0)),
            },
            WINDOW: {"rope_type": "default", "rope_theta": 30.0},
        },
    }
    if has_two_shapes:
        case["num_global_key_value_heads"] = chance.choice((None, 1, 2))
    if case["model_type"] == "gemma4_text":
        # Transformers requires embeddings by layer if layers share keys and values.
        case["hidden_size_per_layer_input"] = 6 if case["num_kv_shared_layers"] else 0
        if chance.random() < 0.3:
            case["hidden_size_per_layer_input"] = 6
        case["vocab_size_per_layer_input"] = 150
        if chance.random() < 0.5:
            case |= {"enable_moe_block": True, "num_experts": 6, "moe_intermediate_size": 22}
            case["top_k_experts"] = chance.randint(1, 4)
    return case


def compare(folder: Path, expected: torch.Tensor, group: ParallelGroup, *, fuses: bool) -> None:
    """Compare the logits of a whole prompt, and of its end after chunks."""
    model = loaded_model(folder, group, fuses=fuses)
    torch.testing.assert_close(run(model, group), expected, rtol=1e-4, atol=1e-4)
    last = run(model, group, (7, 4, NUM_TOKENS - 13, 1, 1))
    torch.testing.assert_close(last, expected[-1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 120))]
)
def test_random_configurations_compute_what_transformers_computes(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    name = f"gemma4-random-{seed}"
    monkeypatch.setitem(CASES, name, random_case(chance))
    save_checkpoint(name, tmp_path)
    expected = reference_logits(tmp_path)
    fuses = chance.random() < 0.7
    compare(tmp_path, expected, SoloGroup(), fuses=fuses)
    if seed % 4 == 0:
        on_two_ranks(lambda group: compare(tmp_path, expected, group, fuses=fuses))


def test_layers_read_the_last_layer_of_their_kind(tmp_path: Path) -> None:
    kinds = [WINDOW, FULL, WINDOW, WINDOW, FULL, FULL]
    config = read_config(
        tmp_path, GEMMA4, num_hidden_layers=6, layer_types=kinds, num_kv_shared_layers=3
    )
    sources = [heads.source for heads in config.layer_heads]
    assert sources == [None, None, None, 2, 1, 1]
    assert config.cached_layers == (0, 1, 2)
    spec = attention_spec(config, SoloGroup(), block_size=16, device=CPU)
    assert [layer.sliding_window for layer in spec.layers] == [512, None, 512]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers leaves no layer of a kind"),
        ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input must be at least"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be one of"),
        ({"global_head_dim": 7}, "global_head_dim must be even"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling is not a field"),
        (
            {"rope_parameters": {FULL: {"rope_type": "yarn", "rope_theta": 5.0}}},
            "rope_parameters.full_attention.rope_type must be one of",
        ),
        (
            {"rope_parameters": {FULL: {"rope_type": "default"}}},
            "rope_parameters.full_attention.rope_theta is missing",
        ),
        (
            {
                "rope_parameters": {
                    FULL: {"rope_theta": 5.0, "magnitude": 2.0},
                    WINDOW: {"rope_theta": 5.0},
                }
            },
            "rope_parameters.full_attention.magnitude is not a field",
        ),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters.rope_theta is not allowed"),
        ({"per_layer_config": {"9": {}}}, "per_layer_config.9 is not the index of a layer"),
        ({"per_layer_config": {"3": {"sliding_window": 2}}}, "per_layer_config.3.sliding_window"),
        ({"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config.0 must be equal"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"attention_logit_softcapping": 30.0}, "attention_logit_softcapping is not a field"),
    ],
)
def test_what_would_change_the_result_is_rejected_by_name(
    changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=part):
        read_config(tmp_path, GEMMA4, **changes)


def test_a_unified_model_has_no_embeddings_by_layer(tmp_path: Path) -> None:
    unified = GEMMA4 | {"architectures": ["Gemma4UnifiedForCausalLM"]}
    assert read_config(tmp_path, unified).layer_embedding is None
    assert read_config(tmp_path, GEMMA4).layer_embedding is not None
    with pytest.raises(CheckpointError, match="hidden_size_per_layer_input must be 0, not 8"):
        read_config(tmp_path, unified, hidden_size_per_layer_input=8)
