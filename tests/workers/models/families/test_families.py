"""The `config.json` of Gemma, BLOOM, MPT and Phi-3, and their unsupported values."""

import math
from pathlib import Path
from typing import Any

import pytest

from pagedray.errors import CheckpointError
from pagedray.model_config import RopeConfig
from tests.workers.models.families.config_json import (
    BLOOM,
    GEMMA2,
    GEMMA3,
    MINISTRAL3,
    MPT,
    OLMO3,
    PHI3,
    SMOLLM3,
    read_config,
    written,
)
from workers.models.families.alibi import alibi_slopes
from workers.models.families.registry import read_model_config

LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
}


def test_gemma2_has_caps_windows_and_tied_embeddings_by_default(tmp_path: Path) -> None:
    config = read_config(tmp_path, GEMMA2)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert config.sliding_windows == (4096, None) * 2
    assert (config.head_size, config.attention_scale) == (256, 256**-0.5)
    assert config.embedding_scale == 48**0.5
    assert config.has_tied_embeddings
    assert (config.norm_kind, config.activation) == ("offset_rms", "gelu_tanh")


def test_null_disables_features_of_gemma2(tmp_path: Path) -> None:
    config = read_config(
        tmp_path,
        GEMMA2,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
        layer_types=["full_attention"] * 4,
        sliding_window=None,
    )
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)
    assert config.sliding_windows == (None,) * 4
    assert not config.has_tied_embeddings


def test_gemma3_has_five_windows_to_a_full_layer_by_default(tmp_path: Path) -> None:
    config = read_config(tmp_path, GEMMA3, num_hidden_layers=8, sliding_window=512)
    assert config.sliding_windows == (512,) * 5 + (None,) + (512,) * 2
    assert (config.attention_soft_cap, config.logit_soft_cap) == (None, None)
    assert config.has_qk_norm
    assert config.rope_of(0) == RopeConfig(theta=1e4)
    assert config.rope_of(5) == RopeConfig(theta=1e6)


@pytest.mark.parametrize(
    "spelling",
    [
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 300.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            }
        },
    ],
)
def test_both_ropes_of_gemma3_are_read_in_both_spellings(
    spelling: dict[str, Any], tmp_path: Path
) -> None:
    config = read_config(tmp_path, GEMMA3, sliding_window_pattern=2, **spelling)
    assert config.rope_of(0) == RopeConfig(theta=300.0)
    assert config.rope_of(1) == RopeConfig(kind="linear", factor=8.0, theta=5e5)


def test_yarn_of_olmo3_scales_layers_without_windows_and_the_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = read_config(tmp_path, OLMO3, rope_theta=500000, rope_scaling=yarn)
    assert config.sliding_windows == (4096, 4096, 4096, None)
    assert config.rope_of(0) == RopeConfig(theta=5e5)
    rope = config.rope_of(3)
    assert rope is not None
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 5e5, 4.0)
    assert config.max_positions == 256


def test_queries_of_ministral3_grow_with_the_original_length(tmp_path: Path) -> None:
    config = read_config(tmp_path, MINISTRAL3, original_max_position_embeddings=32)
    assert config.rope is not None
    assert (config.rope.query_growth, config.rope.original_max_positions) == (0.1, 32)
    assert config.sliding_windows == ()
    assert read_config(tmp_path, MINISTRAL3, sliding_window=9).sliding_windows == (9,) * 4


def test_sizes_of_bloom_are_read_in_three_spellings(tmp_path: Path) -> None:
    config = read_config(tmp_path, BLOOM)
    assert config == read_config(tmp_path, BLOOM, n_embed=..., hidden_size=48)
    assert config == read_config(tmp_path, BLOOM, n_head=..., num_attention_heads=6)
    assert config == read_config(tmp_path, BLOOM, n_layer=..., num_hidden_layers=4)
    assert (config.intermediate_size, config.head_size, config.num_kv_heads) == (192, 8, 6)
    assert config.max_positions == 2048
    assert config.alibi_slopes == alibi_slopes(6)
    assert config.rope is None


def test_mpt_reads_its_attention_from_a_section(tmp_path: Path) -> None:
    plain = read_config(tmp_path, MPT)
    assert (plain.attention_scale, plain.qkv_limit) == (None, None)
    section = {"clip_qkv": 6, "softmax_scale": 0.25, "alibi_bias_max": 16}
    config = read_config(tmp_path, MPT, attn_config=section, max_seq_len=512)
    assert (config.attention_scale, config.qkv_limit) == (0.25, 6.0)
    assert config.alibi_slopes == alibi_slopes(6, 16)
    assert config.max_positions == 512


def test_a_clip_of_zero_disables_clipping(tmp_path: Path) -> None:
    assert read_config(tmp_path, MPT, attn_config={"clip_qkv": 0}).qkv_limit is None


def test_the_older_architecture_name_of_mpt_is_accepted(tmp_path: Path) -> None:
    config = read_config(tmp_path, MPT, architectures=["MPTForCausalLM"])
    assert config.architecture == "MptForCausalLM"


@pytest.mark.parametrize("base", [BLOOM, GEMMA2, GEMMA3, MPT, OLMO3, PHI3, SMOLLM3])
def test_code_of_the_checkpoint_is_ignored(base: dict[str, Any], tmp_path: Path) -> None:
    assert read_config(tmp_path, base, auto_map={"AutoConfig": "x.Y"}) == read_config(
        tmp_path, base
    )


@pytest.mark.parametrize(
    ("changes", "windows"),
    [({}, ()), ({"sliding_window": None}, ()), ({"sliding_window": 9}, (9,) * 4)],
)
def test_windows_of_phi3(changes: dict[str, Any], windows: tuple[int, ...], tmp_path: Path) -> None:
    assert read_config(tmp_path, PHI3, **changes).sliding_windows == windows


@pytest.mark.parametrize("word", ["longrope", "su", "yarn"])
def test_longrope_runs_up_to_the_first_length(word: str, tmp_path: Path) -> None:
    config = read_config(
        tmp_path,
        PHI3,
        original_max_position_embeddings=32,
        rope_scaling=LONGROPE | {"type": word},
        rope_theta=500.0,
    )
    assert config.max_positions == 32
    assert config.rope == RopeConfig(
        kind="longrope",
        theta=500.0,
        original_max_positions=32,
        pair_factors=(1.0, 1.5, 2.0, 2.5),
        magnitude=math.sqrt(1 + math.log(4) / math.log(32)),
        rotary_size=8,
    )


def test_longrope_without_an_extended_context_has_magnitude_one(tmp_path: Path) -> None:
    config = read_config(tmp_path, PHI3, rope_scaling=LONGROPE)
    assert config.max_positions == 128
    assert config.rope is not None
    assert config.rope.magnitude == 1.0


@pytest.mark.parametrize(
    ("changes", "magnitude"),
    [
        ({"attention_factor": 1.25}, 1.25),
        ({"factor": 2.0}, math.sqrt(1 + math.log(2) / math.log(32))),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_the_magnitude_of_longrope_may_be_given(
    changes: dict[str, Any], magnitude: float, tmp_path: Path
) -> None:
    config = read_config(
        tmp_path, PHI3, original_max_position_embeddings=32, rope_scaling=LONGROPE | changes
    )
    assert config.rope is not None
    assert config.rope.magnitude == magnitude


@pytest.mark.parametrize(
    "spelling",
    [
        {"partial_rotary_factor": 0.75},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ],
)
def test_phi3_may_rotate_a_part_of_each_head(spelling: dict[str, Any], tmp_path: Path) -> None:
    config = read_config(tmp_path, PHI3, **spelling)
    assert config.rope == RopeConfig(rotary_size=6)
    assert config.max_positions == 128


_GEMMA_REJECTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"hidden_activation": "gelu"},
        'hidden_activation must be one of gelu_pytorch_tanh, not "gelu"',
    ),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be false, not true"),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
    ({"final_logit_softcapping": "30"}, "final_logit_softcapping"),
    ({"sliding_window": None}, "sliding_window must be an integer"),
    ({"layer_types": ["full_attention"]}, "layer_types must have 4 entries, not 1"),
    ({"layer_types": ["chunked_attention"] * 4}, "layer_types may contain only"),
]


@pytest.mark.parametrize("base", [GEMMA2, GEMMA3])
@pytest.mark.parametrize(("changes", "part"), _GEMMA_REJECTIONS)
def test_values_that_no_gemma_supports_are_named(
    base: dict[str, Any], changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    _check_rejected(tmp_path, base, changes, part)


@pytest.mark.parametrize(
    ("base", "changes", "part"),
    [
        (GEMMA2, {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        (GEMMA2, {"rope_scaling": {"type": "axial"}}, "rope_scaling.type"),
        (GEMMA2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, not 0.5"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null, not 50"),
        (GEMMA3, {"rope_parameters": {"rope_theta": 9.0}}, "rope_parameters.rope_theta is not"),
        (
            GEMMA3,
            {"rope_parameters": {"full_attention": {"rope_type": "axial"}}},
            "rope_parameters.full_attention.rope_type",
        ),
        (
            GEMMA3,
            {"rope_parameters": {"full_attention": {}}, "rope_scaling": {"type": "linear"}},
            "rope_scaling is not allowed together with rope_parameters",
        ),
        (GEMMA3, {"rope_local_base_freq": 0}, "rope_local_base_freq"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        (BLOOM, {"apply_residual_connection_post_layernorm": True}, "must be false, not true"),
        (BLOOM, {"n_head": 5}, "n_head must be a divisor of the hidden size 48, not 5"),
        (BLOOM, {"n_embed": ...}, "hidden_size is missing"),
        (BLOOM, {"layer_norm_epsilon": 0}, "layer_norm_epsilon"),
        (MPT, {"no_bias": False}, "no_bias must be true, not false"),
        (MPT, {"expansion_ratio": 2}, "expansion_ratio must be 4, not 2"),
        (MPT, {"logit_scale": "inv_sqrt_d_model"}, "logit_scale must be null"),
        (MPT, {"norm_type": "rmsnorm"}, "norm_type must be one of low_precision_layernorm"),
        (MPT, {"attn_config": {"alibi": False}}, "attn_config.alibi must be true, not false"),
        (MPT, {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln must be false"),
        (MPT, {"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm must be false"),
        (MPT, {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_config.attn_type"),
        (MPT, {"attn_config": {"attn_uses_sequence_id": True}}, "attn_uses_sequence_id"),
        (MPT, {"attn_config": {"clip_qkv": -1}}, "attn_config.clip_qkv"),
        (MPT, {"attn_config": {"alibi_bias_max": 0}}, "attn_config.alibi_bias_max"),
        (OLMO3, {"rope_theta": 10000.0}, "rope_theta must be 500000.0, not 10000.0"),
        (
            SMOLLM3,
            {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8},
            "layer_types may contain only full_attention unless use_sliding_window is true",
        ),
        (OLMO3, {"sliding_window": None}, "sliding_window must be an integer"),
        (OLMO3, {"hidden_act": "gelu"}, "hidden_act"),
        (MINISTRAL3, {"rope_parameters": ...}, "rope_parameters.rope_type must be yarn"),
        (
            MINISTRAL3,
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters.llama_4_scaling_beta is missing",
        ),
        (MINISTRAL3, {"layer_types": ["sliding_attention"] * 4}, "layer_types is not a field of"),
        (PHI3, {"hidden_act": "gelu"}, "hidden_act"),
        (PHI3, {"attention_bias": True}, "attention_bias must be false, not true"),
        (PHI3, {"mlp_bias": True}, "mlp_bias must be false, not true"),
        (PHI3, {"lm_head_bias": True}, "lm_head_bias must be false, not true"),
        (PHI3, {"sliding_window": 0}, "sliding_window"),
        (PHI3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (
            PHI3,
            {"partial_rotary_factor": 0.7},
            "partial_rotary_factor must result in an even size",
        ),
        (PHI3, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type must be one"),
        (PHI3, {"rope_scaling": LONGROPE | {"type": None}}, "rope_scaling.rope_type is missing"),
        (PHI3, {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "from 2 to"),
    ],
)
def test_unsupported_values_are_named(
    base: dict[str, Any], changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    _check_rejected(tmp_path, base, changes, part)


@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
@pytest.mark.parametrize("value", [None, 3.0, [1.0] * 3, [1.0, 1.0, 1.0, 0], [1.0, 1.0, 1.0, "1"]])
def test_wrong_factors_of_longrope_are_named(key: str, value: object, tmp_path: Path) -> None:
    changes = {
        "original_max_position_embeddings": 32,
        "rope_scaling": LONGROPE | {key: value},
    }
    _check_rejected(tmp_path, PHI3, changes, f"rope_scaling.{key}")


def _check_rejected(folder: Path, base: dict[str, Any], changes: dict[str, Any], part: str) -> None:
    written(folder, base, **changes)
    with pytest.raises(CheckpointError) as caught:
        read_model_config(folder)
    message = str(caught.value)
    assert str(folder / "config.json") in message
    assert part in message
    assert "\n" not in message
