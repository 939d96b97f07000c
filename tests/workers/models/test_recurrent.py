"""Random small models with recurrent layers against transformers: whole, in chunks, on two ranks.

The states of other rows are NaN, so that a result shows if one of them is read.
"""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import CacheConfig, EngineConfig, MatrixDtype
from pagedray.errors import CheckpointError, StartupError
from tests.workers.models.two_ranks import on_two_ranks
from tests.workers.reference import CPU, run
from workers.layers.recurrent import layer_states
from workers.models.decoder import Decoder
from workers.models.families.registry import check_parallel, read_model_config
from workers.models.self_attention import attention_spec
from workers.parallel.group import ParallelGroup, SoloGroup
from workers.weights.checkpoint import with_cache_format
from workers.weights.load_weights import load_weights, with_stored_experts

VOCAB_SIZE = 97
NUM_TOKENS = 150
ENDS = (64, 77, 80, 81, 82, 85, 128, NUM_TOKENS)
NUM_SEEDS = 6
# Any: transformers' configurations take numbers, strings and lists.
Fields = dict[str, Any]


def layer_types(rng: random.Random, kind: str) -> list[str]:
    """Return types of layers: none, one or several alike in a row."""
    patterns = ["ra", "ar", "rra", "raar", "arr", "rrr", "aa"]
    return [kind if one == "r" else "full_attention" for one in rng.choice(patterns)]


def lfm2_fields(rng: random.Random) -> Fields:
    return {
        "layer_types": layer_types(rng, "conv"),
        "conv_L_cache": rng.choice([2, 3, 4]),
        "conv_bias": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
    }


def lfm2_dense_fields(rng: random.Random) -> Fields:
    return lfm2_fields(rng) | {
        "block_auto_adjust_ff_dim": rng.random() < 0.5,
        "block_multiple_of": rng.choice([4, 32]),
        "block_ffn_dim_multiplier": rng.choice([1.0, 1.3]),
    }


def lfm2_moe_fields(rng: random.Random) -> Fields:
    return lfm2_fields(rng) | {
        "num_experts": rng.choice([4, 6]),
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "moe_intermediate_size": 24,
        "num_dense_layers": rng.choice([0, 1, 2]),
        "use_expert_bias": rng.random() < 0.5,
        "norm_topk_prob": rng.random() < 0.5,
        "routed_scaling_factor": rng.choice([1.0, 1.5]),
    }


def delta_fields(rng: random.Random) -> Fields:
    num_key_heads = rng.choice([2, 4])
    return {
        "layer_types": layer_types(rng, "linear_attention"),
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_key_heads * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([8, 16]),
        "linear_value_head_dim": rng.choice([8, 16]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "head_dim": rng.choice([8, 16]),
        "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
        "attention_bias": rng.random() < 0.5,
        "tie_word_embeddings": rng.random() < 0.5,
    }


def delta_moe_fields(rng: random.Random) -> Fields:
    return delta_fields(rng) | {
        "num_experts": rng.choice([4, 6]),
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": rng.choice([8, 40]),
    }


def qwen3_next_fields(rng: random.Random) -> Fields:
    return delta_moe_fields(rng) | {
        "mlp_only_layers": rng.choice([[], [0]]),
        "norm_topk_prob": rng.random() < 0.5,
    }


def granite_fields(rng: random.Random) -> Fields:
    num_groups = rng.choice([1, 2])
    num_experts = rng.choice([0, 4])
    return {
        "layer_types": layer_types(rng, "linear_attention"),
        "mamba_n_heads": 4 * num_groups,
        "mamba_d_head": 24 // num_groups,
        "mamba_n_groups": num_groups,
        "mamba_d_state": rng.choice([8, 16]),
        "mamba_d_conv": rng.choice([2, 4]),
        "mamba_conv_bias": rng.random() < 0.5,
        "mamba_proj_bias": rng.random() < 0.5,
        "mamba_chunk_size": rng.choice([8, 64]),
        "num_local_experts": num_experts,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "position_embedding_type": rng.choice([None, "rope"]),
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.5,
        "tie_word_embeddings": rng.random() < 0.5,
    }


def nemotron_fields(rng: random.Random) -> Fields:
    patterns = ["mem-m*e", "*m-", "me*em", "m", "mm**-", "m-m"]
    kinds = {"m": "linear_attention", "*": "full_attention", "e": "moe", "-": "mlp"}
    num_groups, has_groups = rng.choice([1, 2]), rng.random() < 0.5
    return {
        "layers_block_type": [kinds[one] for one in rng.choice(patterns)],
        "mamba_num_heads": 4 * num_groups,
        "mamba_head_dim": 8,
        "n_groups": num_groups,
        "ssm_state_size": rng.choice([8, 16]),
        "conv_kernel": rng.choice([2, 4]),
        "chunk_size": rng.choice([8, 16, 128]),
        "use_conv_bias": rng.random() < 0.5,
        "use_bias": rng.random() < 0.5,
        "head_dim": 8,
        "n_routed_experts": 8,
        "n_group": 4 if has_groups else 1,
        "topk_group": 2 if has_groups else 1,
        "num_experts_per_tok": rng.choice([1, 3]),
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": rng.choice([None, 16]),
        "norm_topk_prob": rng.random() < 0.5,
        "routed_scaling_factor": 1.7,
    }


def falcon_fields(rng: random.Random) -> Fields:
    num_groups = rng.choice([1, 2])
    return {
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "head_dim": rng.choice([8, 16]),
        "mamba_d_ssm": rng.choice([64, None]),
        "mamba_expand": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": "auto",
        "mamba_n_groups": num_groups,
        "mamba_d_state": rng.choice([8, 16]),
        "mamba_d_conv": rng.choice([2, 4]),
        "mamba_chunk_size": rng.choice([8, 64]),
        "mamba_rms_norm": rng.random() < 0.7,
        "mamba_norm_before_gate": rng.random() < 0.5,
        **{
            key: rng.random() < 0.5
            for key in (
                *("attention_bias", "mlp_bias", "projectors_bias", "mamba_conv_bias"),
                *("mamba_proj_bias", "tie_word_embeddings"),
            )
        },
        **{
            key: rng.uniform(0.3, 1.8)
            for key in (
                *("embedding_multiplier", "lm_head_multiplier", "key_multiplier"),
                *("attention_in_multiplier", "attention_out_multiplier"),
                *("ssm_in_multiplier", "ssm_out_multiplier"),
            )
        },
        "mlp_multipliers": [rng.uniform(0.3, 1.8) for _ in range(2)],
        "ssm_multipliers": [rng.uniform(0.3, 1.8) for _ in range(5)],
    }


SHAPE: Fields = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES = {
    "lfm2": "Lfm2ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
}
FIELDS: dict[str, Callable[[random.Random], Fields]] = {
    "lfm2": lfm2_dense_fields,
    "lfm2_moe": lfm2_moe_fields,
    "qwen3_5_text": delta_fields,
    "qwen3_5_moe_text": delta_moe_fields,
    "qwen3_next": qwen3_next_fields,
    "granitemoehybrid": granite_fields,
    "nemotron_h": nemotron_fields,
    "falcon_h1": falcon_fields,
}


def save_random(model_type: str, fields: Fields, folder: Path, seed: int) -> None:
    """Save a model of random weights, with decays from almost none to almost all."""
    types = fields.get("layer_types")
    fields = SHAPE | fields
    if model_type == "qwen3_5_moe_text":
        del fields["intermediate_size"]
    if types is not None:
        fields["num_hidden_layers"] = len(types)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("A_log"):
                tensor.uniform_(0.01, 16.0).log_()
            elif name.endswith("dt_bias"):
                # Transformers clamps small step sizes of Nemotron-H in chunks alone.
                tensor.uniform_(-2.0 if model_type == "nemotron_h" else -4.0, 4.0)
            elif name.endswith(("bias", "norm.weight", "layernorm.weight")):
                tensor.normal_(0.3, 0.3)
            elif tensor.dim() > 1:
                tensor.normal_(0.0, 1.0 / math.sqrt(tensor.shape[-1]))
    model.save_pretrained(folder)


def token_ids(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=generator)


@torch.inference_mode()
def reference(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    logits: torch.Tensor = model(ids[None], use_cache=False).logits[0]
    return logits


def loaded(folder: Path, group: ParallelGroup) -> Decoder:
    config = with_stored_experts(EngineConfig(model=read_model_config(folder, dtype="float32")))
    model = Decoder(config.model, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, config)
    return model


def assert_near(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Check logits of tokens; where a head's result is nearly 0, its norm makes errors large."""
    errors = (logits - expected).abs().amax(1)
    assert errors.quantile(0.9) < 5e-5
    assert errors.max() < 2e-3


SEEDS = [
    pytest.param(seed, marks=[] if seed < 1 else pytest.mark.slow) for seed in range(NUM_SEEDS)
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model_type", FIELDS)
def test_random_models_compute_what_transformers_computes(
    model_type: str, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(f"{model_type}-{seed}")
    save_random(model_type, FIELDS[model_type](rng), tmp_path, seed)
    ids = token_ids(seed)
    expected = reference(tmp_path, ids)

    def check(group: ParallelGroup) -> None:
        model = loaded(tmp_path, group)
        whole = run(model, group, (NUM_TOKENS,), ids=ids)
        assert_near(whole, expected)
        lengths = [end - start for start, end in zip((0, *ENDS), ENDS, strict=False)]
        for number in (len(ENDS), len(ENDS) - 1):
            last = run(model, group, tuple(lengths[:number]), ids=ids)
            end = ENDS[number - 1]
            assert_near(last, expected[end - lengths[number - 1] : end])

    check(SoloGroup())
    on_two_ranks(check)


@pytest.mark.parametrize(
    ("model_type", "changes", "what"),
    [
        (
            "qwen3_5_text",
            {
                "layer_types": ["linear_attention"],
                "linear_num_key_heads": 3,
                "linear_num_value_heads": 6,
            },
            "3 key heads of recurrent layers",
        ),
        (
            "granitemoehybrid",
            {"mamba_n_heads": 3, "mamba_d_head": 32, "mamba_n_groups": 1},
            "3 heads of recurrent layers",
        ),
        ("nemotron_h", {"mamba_num_heads": 9, "n_groups": 1}, "9 heads of recurrent layers"),
        (
            "falcon_h1",
            {"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_n_groups": 3},
            "3 groups of heads of recurrent layers",
        ),
        (
            "lfm2",
            {"hidden_size": 49, "head_dim": 8, "layer_types": ["conv"]},
            r"49 channels of convolutions \(hidden_size",
        ),
    ],
)
def test_ranks_must_divide_heads_and_groups(
    model_type: str, changes: Fields, what: str, tmp_path: Path
) -> None:
    fields = FIELDS[model_type](random.Random(0)) | {"num_attention_heads": 6} | changes
    config = read_model_config(written(model_type, fields, tmp_path))
    with pytest.raises(StartupError, match=f"^{what}.* cannot be sharded evenly over 2 ranks; use"):
        check_parallel(config, 2)


def written(model_type: str, fields: Fields, folder: Path) -> Path:
    """Write a configuration without weights."""
    names = {"architectures": [ARCHITECTURES[model_type]], "model_type": model_type}
    shape = SHAPE | {"num_hidden_layers": len(fields.get("layer_types", "1"))}
    (folder / "config.json").write_text(json.dumps(shape | fields | names))
    return folder


@pytest.mark.parametrize(
    ("model_type", "key", "kinds"),
    [
        ("lfm2", "layer_types", ["conv", "mamba"]),
        ("qwen3_5_text", "layer_types", ["linear_attention", "mamba"]),
        ("qwen3_next", "layer_types", ["full_attention", "mamba"]),
        ("granitemoehybrid", "layer_types", ["mamba", "rwkv"]),
        ("nemotron_h", "layers_block_type", ["mamba", "rwkv", "moe"]),
        ("nemotron_h", "hybrid_override_pattern", "MX*"),
        ("falcon_h1", "layers_block_type", ["hybrid", "mamba"]),
    ],
)
def test_an_unsupported_type_of_layer_is_named_with_its_layer(
    model_type: str, key: str, kinds: list[str] | str, tmp_path: Path
) -> None:
    folder = written(model_type, {"num_hidden_layers": len(kinds), key: kinds}, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_model_config(folder)
    message = str(caught.value)
    assert f"{key} has {kinds[1]!r} for layer 1, which is not supported; use " in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types must have 2 entries, not 1"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads must be a multiple of"),
        ({"attn_output_gate": False}, "attn_output_gate must be true"),
        ({"output_gate_type": "tanh"}, "output_gate_type must be one of swish, silu"),
        ({"linear_state_scale": 2.0}, "linear_state_scale is not a field of"),
    ],
)
def test_unsupported_values_are_rejected_by_name(
    changes: Fields, message: str, tmp_path: Path
) -> None:
    fields = delta_fields(random.Random(0)) | {"layer_types": ["linear_attention"] * 2}
    save_random("qwen3_5_text", fields, tmp_path, 0)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_matrices_have_the_dtype_of_the_option(dtype: MatrixDtype, tmp_path: Path) -> None:
    fields = delta_fields(random.Random(0)) | {"layer_types": ["linear_attention"] * 2}
    save_random("qwen3_5_text", fields, tmp_path, 0)
    model_config = read_model_config(tmp_path, dtype="float32")
    cache = CacheConfig(mamba_ssm_cache_dtype=dtype)
    config = with_cache_format(EngineConfig(model=model_config, cache=cache))
    group, ids = SoloGroup(), token_ids(0)
    _, matrix = layer_states(config.model, group)[0]
    assert matrix.dtype == (torch.float32 if dtype == "auto" else torch.bfloat16)
    model = Decoder(config.model, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, config)
    errors = (run(model, group, (100, 50), ids=ids) - reference(tmp_path, ids)[100:]).abs()
    # States of 8 bits of precision change results by about 1%.
    assert errors.mean() < (1e-5 if dtype == "auto" else 0.05)
    assert dtype == "auto" or errors.mean() > 2e-5


def test_a_rank_has_its_part_of_a_state(tmp_path: Path) -> None:
    fields = delta_fields(random.Random(0)) | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    save_random("qwen3_5_text", fields, tmp_path, 0)
    config = read_model_config(tmp_path, dtype="bfloat16")

    def num_bytes(group: ParallelGroup) -> int:
        spec = attention_spec(config, group, block_size=16, device=CPU)
        assert spec.state_blocks == -(-spec.state_bytes // spec.block_bytes)
        return spec.state_bytes

    # Two layers: three columns of all channels in bfloat16, and a matrix a head in float32.
    whole = 2 * (3 * (2 * 2 * 16 + 6 * 8) * 2 + 6 * 8 * 16 * 4)
    assert num_bytes(SoloGroup()) == whole
    assert on_two_ranks(num_bytes) == [whole // 2] * 2
