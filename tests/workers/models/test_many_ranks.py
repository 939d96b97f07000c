"""Groups of four and eight ranks against transformers: whole prompts, and prompts in chunks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.models.two_ranks import on_ranks
from tests.workers.reference import NUM_TOKENS, loaded_model, reference_logits, run, save_checkpoint
from tests.workers.reference_cases import CASES
from workers.models.families.registry import check_parallel, read_model_config
from workers.parallel.group import ParallelGroup

FULL, WINDOW, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
# Eight ranks share the KV heads of all of them.
MODELS: dict[str, dict[str, Any]] = {
    "eight-llama": {"model_type": "llama", "kv_heads": 2, "attention_bias": True},
    "eight-experts": {
        "model_type": "qwen3_moe",
        "kv_heads": 4,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
    },
    "eight-sinks": {
        "model_type": "gpt_oss",
        "kv_heads": 2,
        "head_dim": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 6,
    },
    "eight-shapes": {
        "model_type": "gemma4_text",
        "kv_heads": 4,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 4,
        "layer_types": [WINDOW, FULL, WINDOW, FULL],
        "num_kv_shared_layers": 0,
        "sliding_window": 5,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "moe_intermediate_size": 16,
        "top_k_experts": 3,
    },
    "eight-states": {
        "model_type": "qwen3_5_moe_text",
        "kv_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "layer_types": [RECURRENT, FULL, RECURRENT],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    },
    "eight-scans": {
        "model_type": "granitemoehybrid",
        "kv_heads": 2,
        "layer_types": [RECURRENT, FULL, RECURRENT],
        "mamba_n_heads": 16,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
    },
}
ALWAYS = [("eight-shapes", 4, True), ("eight-states", 8, True)]
OTHERS = [
    (name, num_ranks, is_expert_parallel)
    for name in MODELS
    for num_ranks in (4, 8)
    for is_expert_parallel in ((False,) if name == "eight-llama" else (False, True))
    if (name, num_ranks, is_expert_parallel) not in ALWAYS
]


@pytest.mark.parametrize(
    ("name", "num_ranks", "is_expert_parallel"),
    [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_many_ranks_compute_what_transformers_computes(
    name: str,
    num_ranks: int,
    is_expert_parallel: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = {"heads": 8, "intermediate_size": 96, **MODELS[name]}
    monkeypatch.setitem(CASES, name, case)
    save_checkpoint(name, tmp_path)
    expected = reference_logits(tmp_path)
    config = read_model_config(tmp_path)
    check_parallel(config.with_expert_parallel() if is_expert_parallel else config, num_ranks)

    def logits(group: ParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        model = loaded_model(tmp_path, group, is_expert_parallel=is_expert_parallel)
        return run(model, group), run(model, group, (7, 4, NUM_TOKENS - 13, 1, 1))

    # Sums of squares that recurrent layers norm are small in some heads.
    tolerance = 1e-3 if name == "eight-states" else 1e-4
    found = on_ranks(num_ranks, logits)
    for whole, last in found:
        torch.testing.assert_close(whole, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(last, expected[-1:], rtol=tolerance, atol=tolerance)
        assert torch.equal(whole, found[0][0])
